#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Layout does not matter, whole: every layout of np 1, 2, 4 (3 at a batch of 6)
# x ep_size x stage x accumulation, on each variant below and each queue form.
# Usage: layouts.sh BUILD_FOLDER. Needs a build with -Dtest_hooks=true. Exit
# code 0: all agree. Starts mpirun once a line and form.
set -u
program=$1/tests/ranks/rank_layouts
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
failed=0

# layouts RANKS WORD...: one start
layouts() {
  ranks=$1
  shift
  for form in true false; do
    timeout -k 5 900 mpirun -n "$ranks" --oversubscribe --bind-to none \
      "$program" all "$@" comm.thread=$form </dev/null || {
      echo "FAILED: $ranks ranks, $*, comm.thread=$form"
      failed=1
    }
  done
}

zero=zero_optimization
for saved in 1 0.25 8; do
  for chunks in 1 2; do
    rows="moe.saved_rows=$saved moe.overlap_chunks=$chunks"
    # the lists of words are split on purpose
    # shellcheck disable=SC2086
    {
      layouts 4 $rows
      layouts 4 $rows model.tie_word_embeddings=true
      layouts 4 $rows gradient_clipping=0.5
      layouts 4 $rows model.dropout=0.1
      layouts 4 $rows moe.aux_loss=load_balancing moe.aux_loss_coef=0.01
      layouts 4 $rows seed=1 moe.z_loss_coef=0.01
      layouts 4 $rows moe.aux_loss=squared moe.aux_loss_coef=1
      layouts 4 $rows moe.aux_loss=first_choice moe.aux_loss_coef=0.05
      layouts 4 $rows moe.bias_update_rate=0.01 moe.score=sigmoid
      layouts 4 $rows moe.gate_noise=0.1 moe.temperature=1.3
      layouts 4 $rows moe.k=1 moe.noisy_gate_policy=RSample
      layouts 4 $rows moe.top2_2nd_expert_sampling=true
      layouts 4 $rows same_ranks moe.drop_tokens=true moe.use_rts=true \
        moe.capacity_factor=0.75
      layouts 4 $rows moe.k=1
      layouts 4 $rows 'moe.num_experts=[4,8]'
      layouts 4 $rows moe.use_residual=true model.dropout=0.1
      layouts 4 $rows same_ranks moe.use_residual=true moe.gate_noise=0.1 \
        moe.drop_tokens=true moe.capacity_factor=0.75
      layouts 4 $rows moe.num_shared_experts=2 model.architecture=llama
      layouts 4 $rows 'moe.num_experts=[4,8]' \
        use_data_before_expert_parallelism=true
      layouts 4 $rows ep_of_last moe.num_shared_experts=1 \
        moe.shared_expert_gate=true 'moe.num_experts=[4,8]'
      layouts 4 $rows model.architecture=llama model.num_key_value_heads=1
      layouts 4 $rows debug.poison=true
      layouts 4 $rows comm.piece_bytes=4096 $zero.reduce_bucket_size=3000 \
        $zero.allgather_bucket_size=2000
      layouts 4 $rows $zero.stage3_max_reuse_distance=0 \
        $zero.stage3_prefetch_bucket_size=0 \
        $zero.stage3_param_persistence_threshold=0
      layouts 4 $rows use_data_before_expert_parallelism=true
      layouts 4 $rows debug.count_limit=7
      layouts 3 $rows batch=6 experts=6
      layouts 3 $rows batch=6 experts=6 model.tie_word_embeddings=true \
        model.dropout=0.1 gradient_clipping=0.5
    }
  done
done
exit $failed
