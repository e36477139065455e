#!/usr/bin/env bash
# DeepSeek-V3 (671B) on the hosts of a hostfile: 16 pipeline stages, 8 ranks share the experts. It needs a multiple of 16 hosts.
#   mt-resilient run -- bash examples/deepseek_v3/full.sh
source "$(dirname "$0")/../gpt/hosts.sh"
MODEL=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --norm-epsilon 1e-6 --vocab-size 129280
    --init-method-std 0.006
)
ATTENTION=(
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --qk-layernorm --rotary-scaling-factor 1
)
EXPERTS=(
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
NEXT_TOKENS=(--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1)
PARALLEL=(
    --pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 8
    --recompute-granularity full --recompute-method block --recompute-num-layers 1
)
launch "${MODEL[@]}" "${ATTENTION[@]}" "${EXPERTS[@]}" "${NEXT_TOKENS[@]}" "${PARALLEL[@]}" \
    --global-batch-size 15360 --train-samples 24414062 --lr 2.2e-4 --min-lr 2.2e-5
