// SPDX-License-Identifier: Apache-2.0
// Shapes and types of the outputs of GatherSelectionKvCache: four inputs, and a number for each row of the
// table.

#include "register/op_impl_registry.h"

namespace ops {
namespace {

constexpr size_t kTable = 2;  // selection_kv_block_table
constexpr size_t kInPlace = 4;
constexpr size_t kActual = 4;  // selection_kv_actual_seq

ge::graphStatus InferShape(gert::InferShapeContext* context) {
  for (size_t i = 0; i < kInPlace; ++i) {
    const gert::Shape* given = context->GetInputShape(i);
    gert::Shape* made = context->GetOutputShape(i);
    if (given == nullptr || made == nullptr) return ge::GRAPH_FAILED;
    *made = *given;
  }
  const gert::Shape* table = context->GetInputShape(kTable);
  gert::Shape* actual = context->GetOutputShape(kActual);
  if (actual == nullptr || table->GetDimNum() < 1) return ge::GRAPH_FAILED;
  actual->SetDimNum(table->GetDimNum() - 1);
  for (size_t i = 0; i + 1 < table->GetDimNum(); ++i) actual->SetDim(i, table->GetDim(i));
  return ge::GRAPH_SUCCESS;
}

ge::graphStatus InferDataType(gert::InferDataTypeContext* context) {
  for (size_t i = 0; i < kInPlace; ++i) context->SetOutputDataType(i, context->GetInputDataType(i));
  context->SetOutputDataType(kActual, ge::DT_INT32);
  return ge::GRAPH_SUCCESS;
}

}  // namespace

IMPL_OP_INFERSHAPE(GatherSelectionKvCache).InferShape(InferShape).InferDataType(InferDataType);

}  // namespace ops
