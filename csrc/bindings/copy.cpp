// SPDX-License-Identifier: Apache-2.0

#include "tidal/copy.h"

#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings.h"
#include "copy_arguments.h"

namespace nb = nanobind;

namespace {

int64_t copy_rows(const SourceArray& source, const IndexArray& source_rows,
                  const DestinationArray& destination, const std::optional<IndexArray>& destination_rows,
                  int threads, int path) {
  const tidal::CopyPath way = path_of(path);
  const tidal::RowCopy copy{rows_of<const uint8_t>(source), rows_of<uint8_t>(destination), source_rows.data(),
                            destination_rows ? destination_rows->data() : nullptr,
                            static_cast<int64_t>(source_rows.shape(0))};
  const int64_t places =
      destination_rows ? static_cast<int64_t>(destination_rows->shape(0)) : copy.destination.rows();
  if (copy.source.row_bytes != copy.destination.row_bytes || places != copy.count)
    throw std::invalid_argument("shapes differ");
  const nb::gil_scoped_release release;
  const int64_t wrong_source = tidal::first_outside(copy.source_rows, copy.count, copy.source.rows());
  if (wrong_source >= 0) return wrong_source;
  if (copy.destination_rows) {
    const int64_t wrong = tidal::first_outside(copy.destination_rows, copy.count, copy.destination.rows());
    if (wrong >= 0) return copy.count + wrong;
  }
  tidal::copy_all(copy, threads, way);
  return -1;
}

}  // namespace

void bind_copy(nb::module_& module) {
  module.def(
      "best_path", [] { return static_cast<int>(tidal::best_path()); }, "Best copy path of this processor.");
  module.def(
      "has_path", [](int path) { return tidal::has_path(static_cast<tidal::CopyPath>(path)); },
      nb::arg("path"), "Whether this processor has a copy path.");
  module.def(
      "copy_rows", &copy_rows, nb::arg("source").noconvert(), nb::arg("source_rows").noconvert(),
      nb::arg("destination").noconvert(), nb::arg("destination_rows").noconvert().none(), nb::arg("threads"),
      nb::arg("path"),
      "Copy rows; return -1, or the position of the first index outside: of source_rows, or behind them of "
      "destination_rows. Without destination_rows the destination is dense.");
}
