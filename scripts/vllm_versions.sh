# What kvmask is tested against: the only place that names these versions. Read by vllm_env.sh and,
# line by line, by vllm_source.py and vllm_suite.py, so keep it to NAME=value.
VLLM_INSTALLED=0.32.0
VLLM_SOURCES="0.24.0 0.28.0 0.32.0 0.33.0"
MOONCAKE_WHEEL=mooncake-transfer-engine-non-cuda==0.3.13.post1
