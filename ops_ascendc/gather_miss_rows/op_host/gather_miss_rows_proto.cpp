// SPDX-License-Identifier: Apache-2.0
// Shapes and types of the outputs of GatherMissRows: those of the two inputs that they are.

#include "register/op_impl_registry.h"

namespace ops {
namespace {

constexpr size_t kInPlace = 2;

ge::graphStatus InferShape(gert::InferShapeContext* context) {
  for (size_t i = 0; i < kInPlace; ++i) {
    const gert::Shape* given = context->GetInputShape(i);
    gert::Shape* made = context->GetOutputShape(i);
    if (given == nullptr || made == nullptr) return ge::GRAPH_FAILED;
    *made = *given;
  }
  return ge::GRAPH_SUCCESS;
}

ge::graphStatus InferDataType(gert::InferDataTypeContext* context) {
  for (size_t i = 0; i < kInPlace; ++i) context->SetOutputDataType(i, context->GetInputDataType(i));
  return ge::GRAPH_SUCCESS;
}

}  // namespace

IMPL_OP_INFERSHAPE(GatherMissRows).InferShape(InferShape).InferDataType(InferDataType);

}  // namespace ops
