/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the kernels of this folder's operators in the x86 simulation, with the host tiling that CANN would run
 * before them. A plain C interface, for ctypes and for stand-ins of the operator library. Calls may overlap;
 * each keeps its own machine. The tensors are host memory, contiguous; those that an operator writes are
 * written in place. */

#ifndef TIDAL_KERNELS_H_
#define TIDAL_KERNELS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum TidalElement { TIDAL_FLOAT16 = 0, TIDAL_BFLOAT16 = 1, TIDAL_INT8 = 2, TIDAL_INT32 = 3, TIDAL_OTHER = 4 };

enum { TIDAL_SELECTION_TENSORS = 11, TIDAL_MISS_TENSORS = 7, TIDAL_MOST_TENSORS = 11 };

typedef struct TidalTensor {
  void* data;
  int32_t element; /* TidalElement */
  int32_t rank;
  int64_t dims[4];
} TidalTensor;

typedef struct TidalMachine {
  int64_t cores;
  int64_t ub_bytes;     /* as the platform reports it; 0: 192 KB */
  int32_t lazy_dma;     /* strict: a DMA runs only when something waits for it */
  int32_t scalar_cache; /* strict: each core has a data cache of its own for scalar access */
  uint64_t seed;
} TidalMachine;

/* Bytes, of one tensor. */
typedef struct TidalTraffic {
  uint64_t dma_read;
  uint64_t dma_written;
  uint64_t scalar_read;
  uint64_t scalar_written;
} TidalTraffic;

typedef struct TidalReport {
  char error[1024]; /* one line, or empty */
  uint64_t tiling_key;
  int64_t cores; /* that were started */
  int64_t workspace_bytes;
  uint64_t barriers;
  TidalTraffic traffic[TIDAL_MOST_TENSORS];
} TidalReport;

enum TidalOutcome { TIDAL_DONE = 0, TIDAL_REFUSED_BY_HOST = 1, TIDAL_STOPPED = 2 };

/* tensors: selection_k_rope, selection_kv_cache, selection_kv_block_table, selection_kv_block_status,
 * selection_topk_indices, full_k_rope, full_kv_cache, full_kv_block_table, full_kv_actual_seq,
 * full_q_actual_seq, then the output selection_kv_actual_seq. Returns a TidalOutcome; unless it is
 * TIDAL_DONE, report->error says why. */
int tidal_gather_selection_kv_cache(const TidalTensor* tensors, int64_t selection_topk_block_size,
                                    const TidalMachine* machine, TidalReport* report);

/* tensors: selection_k_rope, selection_kv_cache, full_k_rope, full_kv_cache, miss_rows, miss_slots,
 * miss_count. */
int tidal_gather_miss_rows(const TidalTensor* tensors, const TidalMachine* machine, TidalReport* report);

#ifdef __cplusplus
}
#endif

#endif /* TIDAL_KERNELS_H_ */
