# The versions that kvmask is tested with. vllm_env.sh sources this file. vllm_source.py reads it line
# by line, so it may contain only comments and lines NAME=value.
VLLM_INSTALLED=0.32.0
VLLM_SOURCES="0.24.0 0.28.0 0.32.0 0.33.0"
MOONCAKE_WHEEL=mooncake-transfer-engine-non-cuda==0.3.13.post1
