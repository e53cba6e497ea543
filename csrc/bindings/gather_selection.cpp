// SPDX-License-Identifier: Apache-2.0

#include "tidal/gather_selection.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "copy_arguments.h"

namespace nb = nanobind;

namespace {

using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Status = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Actual = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// hits, moved, fetched, fetched rows, wrong row, wrong id
using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Counts gather_selection(const DestinationArray& selection_kv, const DestinationArray& selection_rope,
                        const Table& selection_table, const Status& status, const Table& ids,
                        const SourceArray& full_kv, const SourceArray& full_rope, const Table& full_table,
                        const Lengths& lengths, const Actual& actual, int64_t queries, int64_t block,
                        bool by_blocks, int threads) {
  const auto requests = static_cast<int64_t>(lengths.shape(0));
  const auto rows = requests * queries;
  if (static_cast<int64_t>(ids.shape(0)) != rows || status.shape(0) != ids.shape(0) ||
      status.shape(1) != ids.shape(1) + 1 || selection_table.shape(0) != actual.shape(0) ||
      static_cast<int64_t>(actual.shape(0)) < rows || static_cast<int64_t>(full_table.shape(0)) != requests ||
      selection_kv.shape(2) != full_kv.shape(2) || selection_rope.shape(2) != full_rope.shape(2))
    throw std::invalid_argument("shapes differ");
  const tidal::SelectionCall call{{rows_of<uint8_t>(selection_kv), rows_of<uint8_t>(selection_rope)},
                                  {rows_of<const uint8_t>(full_kv), rows_of<const uint8_t>(full_rope)},
                                  selection_table.data(),
                                  full_table.data(),
                                  lengths.data(),
                                  ids.data(),
                                  status.data(),
                                  actual.data(),
                                  requests,
                                  queries,
                                  static_cast<int64_t>(ids.shape(1)),
                                  block,
                                  static_cast<int64_t>(selection_table.shape(1)),
                                  static_cast<int64_t>(full_table.shape(1)),
                                  by_blocks};
  const nb::gil_scoped_release release;
  const tidal::SelectionCounts done = tidal::gather_selection(call, threads, tidal::best_path());
  return {done.hits, done.moved, done.fetched, done.fetched_rows, done.wrong_row, done.wrong_id};
}

}  // namespace

void bind_gather_selection(nb::module_& module) {
  module.def("gather_selection_kv_cache", &gather_selection, nb::arg("selection_kv").noconvert(),
             nb::arg("selection_rope").noconvert(), nb::arg("selection_table").noconvert(),
             nb::arg("status").noconvert(), nb::arg("ids").noconvert(), nb::arg("full_kv").noconvert(),
             nb::arg("full_rope").noconvert(), nb::arg("full_table").noconvert(),
             nb::arg("lengths").noconvert(), nb::arg("actual").noconvert(), nb::arg("queries"),
             nb::arg("block"), nb::arg("by_blocks"), nb::arg("threads"),
             "Bring selected rows into a selection cache; return what was moved, or the first id in a page "
             "outside.");
}
