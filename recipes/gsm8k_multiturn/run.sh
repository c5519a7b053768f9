#!/usr/bin/env bash
# GSM8K with the answer-checking tool: GRPO on 8 GPUs, see README.md.
#   bash recipes/gsm8k_multiturn/run.sh [--smoke] [--variant qwen3|no_tool|shaped|...] [any.verl.override=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
tools="$root/tool_configs/gsm8k.yaml"
flags=(
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=1024
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
    trainer.total_epochs=15
    trainer.save_freq=20
    trainer.test_freq=20
)
launch "$@"
