#!/usr/bin/env bash
# ReTool's cold start: verl's own SFT trainer on conversations with tool calls, before run.sh.
#   bash recipes/retool/sft.sh [--smoke] [--variant qwen2.5_7b] [any.verl.override=value ...]
# Several nodes: start it on each with NODE_RANK, MASTER_ADDR and perhaps MASTER_PORT set. The model is left in
# OUT/model, where run.sh looks for it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
recipe=retool-sft
tools="$recipe_dir/tools.yaml"
flags=(
    data.train_batch_size=32
    data.max_length=16384
    data.max_token_len_per_gpu=16384
    data.use_dynamic_bsz=True
    data.truncation=right
    model.path=Qwen/Qwen2.5-32B-Instruct
    model.use_remove_padding=True
    model.enable_gradient_checkpointing=True
    engine.ulysses_sequence_parallel_size=4
    optim.lr=1e-5
    optim.lr_scheduler_type=cosine
    optim.lr_warmup_steps_ratio=0.1
    optim.weight_decay=0.01
    optim.clip_grad=1.0
    checkpoint.save_contents=[model,optimizer,extra,hf_model]
    trainer.nnodes=2
    trainer.n_gpus_per_node=8
    trainer.total_epochs=6
    trainer.save_freq=after_each_epoch
    trainer.max_ckpt_to_keep=1
    trainer.test_freq=50
    trainer.logger=[console]
)

cold_start() {
    local smoke="" only="" data="" out="" variants=() own=() places=() given=("${flags[@]}") prepare=() python
    read_options "$@"
    read_variants "$recipe_dir/sft/variants"
    [ -z "$smoke" ] || read_flags "$recipe_dir/sft/smoke.flags"
    local command=("${places[@]}" "${given[@]}" "${own[@]}")
    if [ "$only" = --print ]; then
        printf '%s\n' "${command[@]}"
        return
    fi

    local nodes where=(--standalone)
    nodes="$(last_of trainer.nnodes "${command[@]}")"
    [[ "$nodes" =~ ^[0-9]+$ ]] || usage "trainer.nnodes=$nodes: expected a number"
    if [ "$nodes" -gt 1 ] && [ -z "$only" ]; then
        [ -n "${NODE_RANK:-}" ] && [ -n "${MASTER_ADDR:-}" ] ||
            usage "trainer.nnodes=$nodes: start it on each node with NODE_RANK (0, 1, ...) and MASTER_ADDR set"
        where=(--nnodes="$nodes" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
    fi
    choose_python
    write_data "$recipe_dir/prepare_sft.py"
    [ "$only" != --prepare ] || return 0
    "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node="$(last_of trainer.n_gpus_per_node "${command[@]}")" \
        -m verl.trainer.sft_trainer "${command[@]}"
    ln -sfn "checkpoints/global_step_$(cat "$out/checkpoints/latest_checkpointed_iteration.txt")/huggingface" "$out/model"
    echo "$out/model"
}
cold_start "$@"
