#!/usr/bin/env bash
# A real language model through the same path: SmolLM2-135M-Instruct, its own template and tokenizer, the real SGLang,
# a calculator in reach, GRPO steps on the CPU. See README.md.
#   bash recipes/smollm2/run.sh [any.verl.override=value ...]      STEPS=1 OUT=outputs/smollm2
set -euo pipefail
cd "$(dirname "$0")/../.."
bash scripts/environment.sh
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
out="$(realpath -m "${OUT:-outputs/smollm2}")"
python=.venv/bin/python
mkdir -p "$out"
rm -rf "$out/records"

$python recipes/smollm2/convert.py "$out/model"
# SmolLM2's template has no place for tool schemas, so two worked examples in the prompt show the tool.
$python recipes/quickstart/prepare_data.py "$out/data" --train-size 64 --test-size 4 --examples 2

export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
$python -m verl.trainer.main_ppo \
    hydra.run.dir="$out/hydra" \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/data/train.parquet" \
    data.val_files="$out/data/test.parquet" \
    data.train_batch_size=4 \
    data.max_prompt_length=320 \
    data.max_response_length=128 \
    data.truncation=error \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$out/model" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.fsdp_config.dtype=float32 \
    '+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}' \
    actor_rollout_ref.rollout.name=sglang_async \
    actor_rollout_ref.rollout.dtype=float32 \
    actor_rollout_ref.rollout.load_format=auto \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tool_configs/calculator.yaml \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.agent.default_agent_loop=multiturn_agent \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    +actor_rollout_ref.rollout.custom.multiturn.record_dir="$out/records" \
    reward.custom_reward_function.path=recipes/quickstart/reward.py \
    reward.custom_reward_function.name=compute_score \
    reward.num_workers=1 \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    'trainer.logger=[console,file]' \
    trainer.project_name=smollm2 \
    trainer.experiment_name=calculator \
    trainer.total_training_steps="${STEPS:-1}" \
    trainer.total_epochs=1000 \
    trainer.save_freq=-1 \
    trainer.test_freq=-1 \
    trainer.val_before_train=False \
    trainer.default_local_dir="$out/checkpoints" \
    "$@"
$python recipes/smollm2/report.py "$out"
