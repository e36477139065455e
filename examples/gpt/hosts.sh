# shellcheck shell=bash
# Sourced by the full.sh of each model family: `launch ARGUMENTS` trains with Megatron-LM's pretrain_gpt.py on the hosts of a hostfile.
# On the terminal it starts the same script on every host by ssh; there, where NODE_RANK is set, it starts torchrun. Moore Threads' launch
# scripts have the same shape. These variables must be set, with paths that are the same on every host:
#   MEGATRON_LM   a Megatron-LM checkout
#   DATA          the prefix of a data set that Megatron's preprocess_data.py has made
#   TOKENIZER     a folder with a Hugging Face tokenizer
#   HOSTFILE      a host per line, the first is the master; without it, ./hostfile
set -eu
: "${MEGATRON_LM:?}" "${DATA:?}" "${TOKENIZER:?}"
HOSTFILE=$(realpath "${HOSTFILE:-hostfile}")
script=$(realpath "$0")
export PYTHONPATH=$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=4
# On MUSA, Moore Threads sets these as well:
#   export ACCELERATOR_BACKEND=musa MUSA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 MUSA_KERNEL_TIMEOUT=3200000 MCCL_PROTOS=2 MCCL_CHECK_POINTERS=0

COMMON=(
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --attention-softmax-in-fp32
    --no-check-for-nan-in-loss-and-grad --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" --data-path "$DATA"
    --split "100,0,0" --log-interval 1 --log-throughput --eval-iters 0 --save-interval 1000
)

launch() {
    local hosts rank name
    name=$(basename "$(dirname "$script")")
    mapfile -t hosts < <(awk '!/^#/ && NF {print $1}' "$HOSTFILE")
    if [ -z "${NODE_RANK:-}" ]; then
        mkdir -p logs
        for rank in "${!hosts[@]}"; do
            ssh -f -n "${hosts[rank]}" "cd '$PWD' && MEGATRON_LM='$MEGATRON_LM' DATA='$DATA' TOKENIZER='$TOKENIZER' HOSTFILE='$HOSTFILE' \
                NODE_RANK=$rank bash '$script' >'logs/$name.$rank' 2>&1"
        done
        return
    fi
    torchrun --nproc_per_node 8 --nnodes "${#hosts[@]}" --node_rank "$NODE_RANK" --master_addr "${hosts[0]}" --master_port 14388 \
        --log_dir "logs/$name" --redirects 3 "$MEGATRON_LM/pretrain_gpt.py" \
        "${COMMON[@]}" --save "checkpoints/$name" --load "checkpoints/$name" "$@"
}
