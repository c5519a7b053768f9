#!/usr/bin/env bash
# Search-R1: questions answered with a search engine, GRPO on 8 GPUs, see README.md.
#   bash recipes/search_r1/run.sh [--smoke] [--variant f1|ppo|qwen2.5_7b|...] [any.verl.override=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
tools="$root/tool_configs/retrieval.yaml"
flags=(
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=3072
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.clip_ratio=0.2
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
    ++actor_rollout_ref.rollout.custom.multiturn.max_tool_calls=4
    ++actor_rollout_ref.rollout.custom.multiturn.turn_length=500
    ++actor_rollout_ref.rollout.custom.multiturn.observation_length=500
    trainer.total_epochs=15
    trainer.total_training_steps=1005
    trainer.save_freq=100
    trainer.test_freq=50
)
launch "$@"
