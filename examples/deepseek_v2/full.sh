#!/usr/bin/env bash
# DeepSeek-V2 (236B) on the hosts of a hostfile: 12 pipeline stages, 8 ranks share the experts. It needs a multiple of 12 hosts.
#   mt-resilient run -- bash examples/deepseek_v2/full.sh
source "$(dirname "$0")/../gpt/hosts.sh"
MODEL=(
    --num-layers 60 --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 128 --norm-epsilon 1e-6 --vocab-size 102400
    --init-method-std 0.006
)
ATTENTION=(
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --qk-layernorm --rotary-scaling-factor 1
)
EXPERTS=(
    --num-experts 160 --moe-layer-freq "([0]+[1]*59)" --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 3072
    --moe-router-topk 6 --moe-router-num-groups 8 --moe-router-group-topk 3 --moe-router-pre-softmax --moe-router-topk-scaling-factor 16
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 3e-3 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
PARALLEL=(--pipeline-model-parallel-size 12 --expert-model-parallel-size 8 --recompute-granularity full --recompute-method block)
launch "${MODEL[@]}" "${ATTENTION[@]}" "${EXPERTS[@]}" "${PARALLEL[@]}" --recompute-num-layers 1 \
    --global-batch-size 9216 --train-samples 24414062 --lr 2.4e-4 --min-lr 2.4e-5
