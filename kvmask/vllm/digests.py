"""The digests of vLLM's functions in every release, as far as kvmask rests on them.

Made by scripts/vllm_digests.py. A digest holds from the release named with it to the next one.
"""

DIGESTS = """
coordinator.store_mask 0.24:a7227b342b 0.25:0c95db9f52 0.29:c206493f66
coordinator.lookup_mask 0.24:ebc5e404e2 0.25:1c1f898d87
coordinator.load_mask 0.24:f7c750c47c 0.26:0d9c79364d
coordinator.find_longest_cache_hit 0.24:51fcc43fc9
worker.lookup 0.24:0d56ea9016 0.25:cd4ec1940a 0.26:b8d1cbe5f0 0.27:3f519b131a 0.29:722920608b
 0.30:2c9602f10e
sending.handle_request 0.24:4583d9c1c8 0.25:fe65b6a581 0.27:4f94467e9a 0.28:ecf9b82913
 0.29:1722e8ae53 0.30:e8d9fae099 0.32:f085288152
receiving.handle_request 0.24:6b25660156 0.25:61982e8ee3 0.27:8b991b86c3 0.29:0366235ecd
 0.30:df85a86d76 0.31:7ccf425de0
layout.prepare_values 0.30:9435cc3e79
sharded_layout.prepare_values 0.30:0fdfb5507a
database.prepare_values 0.27:721bf11a73 0.30:-
connector.stats 0.24:f598c2e518
connector.build_stats 0.24:64d8927fa7
connector.build_metrics 0.24:4104408ea5
core.block_hasher 0.24:d1e20a3599 0.31:6d5800ff3c 0.33:300c28bc4c
core.hash_block_tokens 0.24:8e2dca03c9
core.extra_keys 0.24:99dc15c98e 0.31:fa6bc5040a
core.init_none_hash 0.24:63878e6b6f 0.29:6980053f32
hashing.sha256 0.24:7e489d2920
hashing.sha256_cbor 0.24:13cf39b8e5
hashing.xxhash 0.24:05af98f6fa
hashing.xxhash_cbor 0.24:ec250c0868
hashing.xxhash_digest 0.24:9d5a682022
request.all_token_ids 0.24:d292dc3b5b 0.29:3c2e5fa3cb
request.block_hashes 0.24:cb32ae924e
request.num_tokens 0.24:14c5cc8ed2
request.mm_features 0.24:e503b52555
request.prompt_embeds 0.24:748979d59c
request.cache_salt 0.24:32f37217a3
request.lora_request 0.24:6744c6bb83
coordinator.init 0.24:62661df32c 0.27:045ccfb090 0.29:5b4e6b1bde 0.30:46d555572a 0.32:dc0bff9d33
coordinator.from_config 0.32:fe8853b8df
coordinator.split 0.24:9e3214c7b6 0.27:b34fbcd25c 0.30:45c46afb98 0.32:c5e25b8bb3 0.33:ea14719e89
coordinator.align_lookup_length 0.27:bc8e14b7f8
coordinator.hashes_for_spec 0.24:046b83cbff
coordinator.reachable_masks 0.24:a136dcadfe 0.25:15ca3de899 0.26:bd83774604 0.27:f8926897db
 0.29:91b1499f97 0.30:21577177e8 0.32:8f1ce0f933 0.33:0b8a856aa7
coordinator.find_hit_blocks 0.24:9897705d7a 0.26:56ea86d530 0.27:897c779ca7 0.29:faffc872ad
 0.32:37348af6e4
coordinator.unwrap_spec 0.24:97107dba76
coordinator.coverage_spec 0.33:7784a42ed2
coordinator.partial_hits 0.27:13434e66a3 0.29:7c74d473ed 0.30:d6a403cef9 0.32:-
coordinator.spec_group 0.30:e56ad934f4
core.spec_group 0.24:842503a18c
pool.init 0.24:e66fe00fe8 0.26:b3dc387252
pool.get_cached_block 0.24:deb5d9e165
pool.contains 0.29:7e170e99e5
manager.reachable_block_mask 0.24:8419978f98 0.26:c4cfe4d962 0.30:b5f70b906e
full.find 0.24:3413c02f09 0.26:92d5147598 0.27:6dd4e4634b
window.need 0.24:1459460e6e
window.find 0.24:e6dc4c6bae 0.26:9697efe263 0.30:317189354f
window.mask 0.24:f1f995eb47 0.26:ef07d0e4bf 0.30:5e71c02618
chunked.find 0.24:9a95870025 0.26:8a0f8a6ad0
state.find 0.24:8bc2026375 0.26:7aed2db6ac 0.27:81e2b7c1a1
state.mask 0.24:3dc1f246d3 0.26:ebe9af2de7 0.30:1f91c44801
core.resolve_block_hashes 0.26:c74fcc5f9f
core.hash_list 0.24:cd00bd6c9c
core.eagle_proof_margin 0.32:8859217b2f
core.replay_boundaries 0.32:0cdade56fe
spec.prefix_cacheable 0.29:f1d6b9f68e
data.chunk_hashes 0.24:6e6b499cd9
data.compact_hashes 0.24:0703a500dd
data.blob_hashes 0.24:4534864a61
data.key_metadata 0.24:c30547ba53 0.30:e8dfd26f63
data.build_prefix 0.25:d11e6e3f0a 0.30:cef788d391
data.build_key 0.25:3ea52eee27
data.key_text 0.24:1bd3de640c 0.25:4ed71ea7b7
data.lookup_result 0.29:f3ab4a4a26
data.tail_boundary 0.29:baf623f658
worker.tail_key_boundaries 0.29:2fb3e5d702 0.30:9b455e7290
worker.record 0.24:7e0cf2f39a
worker.prefixes 0.25:ac554b2e3b 0.27:afe679298f 0.30:0d88384948
worker.databases 0.30:5fda70c2a7
worker.capacity_only 0.27:9d4307425d 0.29:4b4e2f451b
worker.hash_block_size 0.24:c4b1564bcf 0.30:66245e2a71 0.32:ac2e8c007c
worker.kv_cache_groups 0.24:9ee54ad6e6 0.29:239d85a60b 0.30:5dd543a447 0.32:867f7f87e4
worker.coord 0.24:13894ec0cd 0.32:2b2844e729
worker.store 0.24:eecfaeb7a1 0.27:866c1ca739 0.31:c8f5f841ef
worker.token_dbs 0.24:94bd755413 0.27:eb6699d58a 0.30:ae4a16e333
worker.num_kv_head 0.24:1c7b42f09a 0.27:6fc5109bfa
client.init 0.24:dd953cb889 0.29:6cfe64313d
client.path 0.24:10e429ff68 0.28:a27338add1
client.lookup 0.24:7e005da44e 0.27:330cff454f 0.29:00f102ec80
client.send 0.24:d2b59d17da 0.27:c878ab50a2 0.29:516134c336
client.discard 0.24:ed43948144
client.reset 0.24:e73e791eed
client.close 0.24:a66966fcb1
server.init 0.24:1741bd811c 0.27:afa7b423c4 0.29:78b8bfc227
server.close 0.24:7ed061c4e8
protocol.lookup 0.24:b6041838b4
protocol.encode 0.29:af0397d7fd
protocol.decode 0.29:d7de6708d4
scheduler.reset 0.24:0f69b15194
scheduler.matched_tokens 0.24:92342f9de3 0.27:fbe1fc2164 0.29:f00fd49036
scheduler.client 0.24:cf04bb810b
scheduler.block_size 0.24:694dc5f7bb 0.32:92ff3d5fa2
scheduler.store_coord 0.32:51e4570016 0.33:5492c974cf
database.init 0.24:df154990f2 0.25:8a87cb1849 0.30:abf803ff0d
database.process_tokens 0.24:2c54e4a1dc 0.25:be32f69ab0 0.27:05e0a088ff
database.key_for 0.25:7a086cbd1a 0.30:c208a3d2b5
database.value_for_block 0.27:9ca01621f0 0.30:6ee66e2bd9
database.set_addresses 0.24:bf5b8707b6 0.30:d3a3f58a12
database.set_lengths 0.24:3ba990beba 0.30:b1aaeb2f31
layout.base 0.30:0d9d6533fd
layout.init 0.30:81eba16992
layout.key_for 0.30:130fcbfae6
layout.shard_ids 0.30:b192f2c6f9
layout.prefixes 0.30:b558f1d65f
layout.register 0.30:740e287089
sharded_layout.init 0.30:2c502ab053
sharded_layout.key_for 0.30:d8b63c23ef
sharded_layout.shard_ids 0.30:e7d190ed07
sharded_layout.prefixes 0.30:27eb8c8d9d
sharded_layout.register 0.30:8be070a810
sharded_layout.templates 0.30:e011251e9e
thread.init 0.24:ccc5a4f902 0.25:aaf69411b2
thread.run 0.24:32cb7db842 0.25:314ee4b86c
thread.record 0.24:99f630fe9c
thread.add_request 0.24:02c224c00a
thread.set_finished 0.24:76014fa873
thread.update_events 0.24:bb758a1814
sending.init 0.24:2fed314c6f 0.25:ceb1b8e9f8 0.27:22d8aa2f7c 0.28:fe45175c00 0.29:b4cddb9fe7
 0.30:d441ba55a6
sending.add_request 0.28:5fe3d90a21
sending.is_live 0.28:c6cbfe281b
sending.finish 0.28:32742158e1
sending.saved 0.25:68d9d451fb 0.28:8c6a50300a
sending.get_retry 0.29:06cba18130
sending.retry 0.29:63e025ecb5
sending.should_skip 0.24:ed3588c246
sending.mark_skipped 0.24:cf22f459a1 0.28:549f2a3631
sending.clear_pressure 0.24:7893ff3596
sending.boundaries 0.29:0fbad52bbf 0.32:1fbacce196
receiving.init 0.24:f471ef9ebd 0.25:6c1a05b114 0.30:822cda6d90 0.31:d727e42595
receiving.report 0.31:d869be5935
receiving.add_errors 0.24:f6997c4373
worker.register 0.24:45415f885b 0.25:7fbd218960 0.27:5a1bdf0438 0.28:891867c13b 0.29:0d706e8617
 0.30:4cf53e90b3 0.31:20d19fda4f
worker.start_load 0.24:589f1041cf 0.29:380ebe9ef5
worker.wait_for_save 0.24:3e78c8fb59 0.29:345ffe790f
worker.group_id 0.28:831b9d0655 0.30:6af3a5c327
worker.no_handle 0.24:b9fd038d3d
worker.rotate 0.24:57a5e42159
worker.usable_budget 0.24:3f4b151cad
worker.staging 0.24:b35c14072e
worker.split_batches 0.24:b815d0d650
worker.replica_tiers 0.24:a8c7262697
worker.log_tiers 0.24:3ce90a295e
data.req_meta 0.24:f86100d5d4 0.27:0ea074c0bc 0.28:e443f5dac0 0.29:8080174baa 0.32:68b61753ef
data.from_request_tracker 0.24:4677d8f5d4 0.29:aa9a29a012 0.32:aee0eee00b
data.load_spec 0.24:ccb9ef9c1d 0.29:d2438ef932
core.convert_block_hash 0.24:2f015d8ca7
core.null_block 0.24:5feceb66ff
events.block_stored 0.24:660e0a2ef4 0.26:54274b0eb0 0.29:d1117b5c28 0.30:108741f6e6
 0.31:417973e809 0.33:5f12b98b5a
connector.init 0.24:68ba694778 0.27:c27f172b82 0.29:c402053a1d
connector.matched_tokens 0.24:404e5dff03
connector.register 0.24:7bd20a79ec
connector.reset 0.24:126586271e
connector.shutdown 0.24:ceea209566
metrics.stats 0.24:f1003f2bc1
metrics.prometheus 0.24:35b2cceea3
metrics.base 0.24:7af752f537
"""
