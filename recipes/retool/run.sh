#!/usr/bin/env bash
# ReTool: competition mathematics with a code interpreter, GRPO on 4 nodes of 8 GPUs, see README.md.
#   bash recipes/retool/run.sh [--smoke] [--variant qwen2.5_7b|ppo|...] [any.verl.override=value ...]
# It begins from the model of the cold start: bash recipes/retool/sft.sh, then actor_rollout_ref.model.path=…
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/launch.sh"
tools="$recipe_dir/tools.yaml"
flags=(
    data.train_batch_size=512
    data.max_prompt_length=2048
    data.max_response_length=16384
    actor_rollout_ref.model.path="$root/outputs/retool-sft/model"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=73728
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.n=30
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.6
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8
    ++actor_rollout_ref.rollout.custom.multiturn.observation_length=1024
    # A wrong answer earns something for its turns with calls, as in verl's recipe (there on a scale from -1 to 1).
    ++reward.custom_reward_function.reward_kwargs.math.wrong_call_credit=0.05
    ++reward.custom_reward_function.reward_kwargs.math.wrong_call_limit=0.2
    trainer.nnodes=4
    trainer.total_epochs=100 # the original's one: its file repeats each problem a hundred times
    trainer.save_freq=30
    trainer.test_freq=5
)
launch "$@"
