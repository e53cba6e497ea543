// SPDX-License-Identifier: Apache-2.0
// The operator GatherMissRows on the vector cores of A2 and A3: rows of the full pool into rows of the
// selection cache, both named by lists that were made elsewhere. Each core takes an equal part of all lists;
// no core waits for another. The outputs alias the first two inputs and are not looked at.

#include "tidal_miss_tiling.h"
#include "tidal_row_lists.h"

extern "C" __global__ __aicore__ void gather_miss_rows(GM_ADDR selection_k_rope, GM_ADDR selection_kv_cache,
                                                       GM_ADDR full_k_rope, GM_ADDR full_kv_cache,
                                                       GM_ADDR miss_rows, GM_ADDR miss_slots,
                                                       GM_ADDR miss_count, GM_ADDR selection_k_rope_out,
                                                       GM_ADDR selection_kv_cache_out, GM_ADDR workspace,
                                                       GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(tidal::MissTiling);
  GET_TILING_DATA_WITH_STRUCT(tidal::MissTiling, data, tiling);
  AscendC::TPipe pipe;
  tidal::RowLists<true> lists;
  tidal::RowCopier copier;
  lists.Init(pipe, data.copy, miss_rows, miss_slots, nullptr, miss_count, sizeof(int32_t), data.rows,
             data.pitch);
  copier.Init(pipe, data.copy, selection_k_rope, selection_kv_cache, full_k_rope, full_kv_cache);
  lists.CopyShare(copier);
}
