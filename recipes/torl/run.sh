#!/usr/bin/env bash
# ToRL: mathematics with Python in the text, GRPO from a base model on 8 GPUs, see README.md.
#   bash recipes/torl/run.sh [--smoke] [--variant qwen2.5_math_7b|zerotir|simpletir|...] [any.verl.override=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
tools="$recipe_dir/tools.yaml"
plain_prompt="{% for message in messages %}{% if message['role'] == 'user' %}"
plain_prompt+="{{ 'A conversation between User and Assistant. The user asks a question, and the Assistant solves it.\\nUser: ' }}"
plain_prompt+="{{ message['content'] }}{{ '\\nAssistant:' }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
flags=(
    data.train_batch_size=128
    data.max_prompt_length=400
    data.max_response_length=3072
    actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-1.5B
    # The plain prompt of the paper in the place of a chat template; a base model knows none.
    "actor_rollout_ref.model.custom_chat_template=\"$plain_prompt\""
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.multi_turn.format=tir
    actor_rollout_ref.rollout.skip_tokenizer_init=False
    ++actor_rollout_ref.rollout.custom.multiturn.max_tool_calls=1
    ++actor_rollout_ref.rollout.custom.multiturn.observation_length=512
    ++reward.custom_reward_function.reward_kwargs.math.ignore_signs=True # as its normaliser does
    trainer.total_epochs=10
    trainer.save_freq=20
    trainer.test_freq=4
)
launch "$@"
