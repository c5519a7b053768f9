#!/usr/bin/env bash
# SkyRL-SQL: text to SQL over several turns, GRPO on 8 GPUs, see README.md.
#   bash recipes/text2sql/run.sh [--smoke] [--variant strict|...] [any.verl.override=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
tools="$root/recipes/text2sql/tools.yaml"
flags=(
    data.train_batch_size=256
    data.max_prompt_length=6000
    data.max_response_length=26000
    actor_rollout_ref.model.path=Qwen/Qwen2.5-Coder-7B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.clip_grad=0.5
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32000
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.clip_ratio=0.2
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.temperature=0.6
    actor_rollout_ref.rollout.top_p=0.95
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32000
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6
    ++actor_rollout_ref.rollout.custom.multiturn.turn_length=3000
    ++actor_rollout_ref.rollout.custom.multiturn.turns_reminder=True
    ++actor_rollout_ref.rollout.custom.multiturn.observation_length=3000
    ++reward.custom_reward_function.reward_kwargs.sql.root=data/omnisql # as in tools.yaml
    ++reward.custom_reward_function.reward_kwargs.sql.compare=set
    ++reward.custom_reward_function.reward_kwargs.sql.timeout_s=30
    trainer.total_epochs=30
    trainer.save_freq=60
    trainer.test_freq=5
)
launch "$@"
