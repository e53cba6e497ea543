// SPDX-License-Identifier: Apache-2.0
// The operator GatherSelectionKvCache on the vector cores of A2 and A3.
//
// Plan: the leader of a row (core row % cores) decides which slot each id gets, and lists what has to be
// copied.
//
// Copy: every core takes an equal part of all lists, whatever the number of rows. Only misses are read from
// the pool.
//
// Commit: the leader writes the row's status and its number of tokens.
//
// One barrier stands behind the plans. Everything that can be wrong with the arguments stops the kernel
// before it, so that then neither cache nor status has changed. No barrier stands before the commit: a status
// is read and written by its leader alone, so that one would cost every layer of every step and order
// nothing. full_q_actual_seq and the outputs that alias inputs are not looked at.

#include "tidal_row_commit.h"
#include "tidal_row_lists.h"
#include "tidal_row_planner.h"

namespace tidal {

template <bool kByBlocks>
__aicore__ inline void GatherSelection(const SelectionTiling& tiling, const PlanArguments& arguments,
                                       GM_ADDR selection_rope, GM_ADDR selection_kv, GM_ADDR full_rope,
                                       GM_ADDR full_kv, GM_ADDR actual) {
  AscendC::TPipe pipe;
  RowPlanner<kByBlocks> planner;
  RowLists<false> lists;
  RowCopier copier;
  RowCommit commit;
  const PlanStore& store = tiling.store;
  const GM_ADDR workspace = arguments.workspace;
  planner.Init(pipe, tiling, arguments);
  lists.Init(pipe, tiling.copy, workspace + store.sources, workspace + store.targets,
             kByBlocks ? workspace + store.tokens : nullptr, workspace + store.heads, kCacheLine, tiling.rows,
             store.pitch);
  copier.Init(pipe, tiling.copy, selection_rope, selection_kv, full_rope, full_kv);
  commit.Init(pipe, tiling, arguments.status, actual, workspace);

  const int64_t cores = AscendC::GetBlockNum();
  const int64_t core = AscendC::GetBlockIdx();
  for (int64_t row = core; row < tiling.rows; row += cores) planner.Plan(row);
  AscendC::PipeBarrier<PIPE_ALL>();
  AscendC::SyncAll<true>();
  if constexpr (kByBlocks) {
    for (int64_t row = core; row < tiling.rows; row += cores) commit.Exchange(copier, row);
  }
  lists.CopyShare(copier);
  for (int64_t row = core; row < tiling.table_rows; row += cores) commit.Commit(row);
}

}  // namespace tidal

extern "C" __global__ __aicore__ void gather_selection_kv_cache(
    GM_ADDR selection_k_rope, GM_ADDR selection_kv_cache, GM_ADDR selection_kv_block_table,
    GM_ADDR selection_kv_block_status, GM_ADDR selection_topk_indices, GM_ADDR full_k_rope,
    GM_ADDR full_kv_cache, GM_ADDR full_kv_block_table, GM_ADDR full_kv_actual_seq, GM_ADDR full_q_actual_seq,
    GM_ADDR selection_k_rope_out, GM_ADDR selection_kv_cache_out, GM_ADDR selection_kv_block_table_out,
    GM_ADDR selection_kv_block_status_out, GM_ADDR selection_kv_actual_seq, GM_ADDR workspace,
    GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);  // vector cores alone, which meet in SyncAll
  REGISTER_TILING_DEFAULT(tidal::SelectionTiling);
  GET_TILING_DATA_WITH_STRUCT(tidal::SelectionTiling, data, tiling);
  const tidal::PlanArguments arguments{selection_kv_block_table, selection_kv_block_status,
                                       selection_topk_indices,   full_kv_block_table,
                                       full_kv_actual_seq,       AscendC::GetUserWorkspace(workspace)};
  if (TILING_KEY_IS(1)) {
    tidal::GatherSelection<true>(data, arguments, selection_k_rope, selection_kv_cache, full_k_rope,
                                 full_kv_cache, selection_kv_actual_seq);
  } else if (TILING_KEY_IS(2)) {
    tidal::GatherSelection<false>(data, arguments, selection_k_rope, selection_kv_cache, full_k_rope,
                                  full_kv_cache, selection_kv_actual_seq);
  }
}
