#!/usr/bin/env bash
# A real language model learns to use a calculator, on a CPU: SmolLM2-135M-Instruct, GRPO, see README.md.
#   bash recipes/smollm2/run.sh [--smoke] [--variant no_tool] [any.verl.override=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
on_cpu=1
tools="$root/tool_configs/calculator.yaml"
# shellcheck disable=SC2016  # launch fills in $out
flags=(
    data.train_batch_size=8
    data.max_prompt_length=96
    data.filter_overlong_prompts=False # all of them fit
    data.max_response_length=96
    data.seed=0
    data.dataloader_num_workers=0
    'actor_rollout_ref.model.path=$out/model'
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=4e-5
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.data_loader_seed=0
    actor_rollout_ref.actor.fsdp_config.seed=0
    # The same precision on both sides: their probabilities then agree to some 1e-6.
    actor_rollout_ref.actor.fsdp_config.dtype=float32
    '++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}'
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.load_format=auto
    actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 # of what is free; max_total_tokens is the bound
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3
    actor_rollout_ref.rollout.agent.num_workers=1
    ++actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed=0
    ++actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=8192
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128 # a quarter of the model at once
    '++actor_rollout_ref.rollout.custom.multiturn.record_dir=$out/records'
    # Seconds for one answer, for a machine that is busy with training.
    ++reward.custom_reward_function.reward_kwargs.reasoning_gym.timeout_s=60
    ++ray_kwargs.ray_init.include_dashboard=False
    reward.num_workers=1
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    trainer.n_gpus_per_node=1
    trainer.nnodes=1
    trainer.total_training_steps=12
    trainer.total_epochs=1000
    trainer.save_freq=6 # 1.6 GB, so that a run that was stopped can go on
    trainer.max_actor_ckpt_to_keep=1
    trainer.test_freq=12
    trainer.val_before_train=True
)
launch "$@"
