// SPDX-License-Identifier: Apache-2.0
// The prototype of GatherSelectionKvCache, from which CANN's op_build makes aclnnGatherSelectionKvCache. The
// outputs that bear the name of an input are that input, written in place.

#include "register/op_def_registry.h"

namespace ops {

class GatherSelectionKvCache : public OpDef {
 public:
  explicit GatherSelectionKvCache(const char* name) : OpDef(name) {
    for (const char* cache : {"selection_k_rope", "selection_kv_cache"}) Rows(this->Input(cache));
    for (const char* table :
         {"selection_kv_block_table", "selection_kv_block_status", "selection_topk_indices"}) {
      Numbers(this->Input(table));
    }
    for (const char* pool : {"full_k_rope", "full_kv_cache"}) Rows(this->Input(pool));
    for (const char* table : {"full_kv_block_table", "full_kv_actual_seq", "full_q_actual_seq"}) {
      Numbers(this->Input(table));
    }
    for (const char* cache : {"selection_k_rope", "selection_kv_cache"}) Rows(this->Output(cache));
    for (const char* table :
         {"selection_kv_block_table", "selection_kv_block_status", "selection_kv_actual_seq"}) {
      Numbers(this->Output(table));
    }
    this->Attr("selection_topk_block_size").AttrType(OPTIONAL).Int(64);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }

 private:
  // One column for each element type of the rows.
  static void Rows(OpParamDef& parameter) {
    parameter.ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_BF16, ge::DT_INT8})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND})
        .UnknownShapeFormat({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND})
        .AutoContiguous();
  }

  static void Numbers(OpParamDef& parameter) {
    parameter.ParamType(REQUIRED)
        .DataType({ge::DT_INT32, ge::DT_INT32, ge::DT_INT32})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND})
        .UnknownShapeFormat({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND})
        .AutoContiguous();
  }
};

OP_ADD(GatherSelectionKvCache);

}  // namespace ops
