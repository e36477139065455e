# shellcheck shell=bash
# Sourced by the train.sh of each model family: the function `toy` trains a model at toy size with Megatron's own loop, on mock data.
# Without a GPU it runs on CPUs with gloo. RANKS: how many ranks. PRETRAIN: another script. MEGATRON_LM: a Megatron-LM checkout; without it,
# scripts/megatron must have fetched one.
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=${MEGATRON_LM:-$examples/../.venv/megatron/megatron-0.17.1}${PYTHONPATH:+:$PYTHONPATH}
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

SIZE=(
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 8 --train-iters 12
)
TRAINING=(
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters 12 --lr-warmup-iters 2
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --attention-dropout 0.1 --hidden-dropout 0.1 # the full models have none; here, random generators take part in the result
)
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --split "100,0,0" --num-workers 0)
LOGGING=(--log-interval 1 --eval-iters 0 --eval-interval 1000)
# What all four families have.
SHAPE=(
    --position-embedding-type rope --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --untie-embeddings-and-output-weights
)
# No Transformer Engine, no Apex, no fused kernels: none of them runs on a CPU.
PLAIN=(
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --distributed-backend
)
if [ -e /dev/nvidiactl ]; then PLAIN+=(nccl); else PLAIN+=(gloo); fi

toy() {
    exec torchrun --standalone --nproc-per-node "${RANKS:-2}" "${PRETRAIN:-$examples/gpt/pretrain_gpt.py}" "${SIZE[@]}" "${TRAINING[@]}" "${DATA[@]}" \
        "${LOGGING[@]}" "${SHAPE[@]}" "${PLAIN[@]}" "$@"
}
