// SPDX-License-Identifier: Apache-2.0
// The prototype of GatherMissRows, from which CANN's op_build makes aclnnGatherMissRows. Both outputs are the
// input of their name, written in place.

#include "register/op_def_registry.h"

namespace ops {

class GatherMissRows : public OpDef {
 public:
  explicit GatherMissRows(const char* name) : OpDef(name) {
    for (const char* cache : {"selection_k_rope", "selection_kv_cache", "full_k_rope", "full_kv_cache"}) {
      Rows(this->Input(cache));
    }
    for (const char* list : {"miss_rows", "miss_slots", "miss_count"}) Numbers(this->Input(list));
    for (const char* cache : {"selection_k_rope", "selection_kv_cache"}) Rows(this->Output(cache));
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

OP_ADD(GatherMissRows);

}  // namespace ops
