"""The compiled hot path of a KV-cache offload connector: masks, keys, addresses, hits."""
