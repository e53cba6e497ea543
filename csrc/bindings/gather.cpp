// SPDX-License-Identifier: Apache-2.0

#include "tidal/gather.h"

#include <nanobind/ndarray.h>

#include <stdexcept>

#include "bindings.h"

namespace nb = nanobind;

namespace {

using Pool = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;
using Slots = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>;

int64_t gather_rows(const Pool& pool, const Slots& slots, const Out& out, int threads, int path) {
  const auto way = static_cast<tidal::CopyPath>(path);
  if (!tidal::has_path(way)) throw std::invalid_argument("this processor lacks the asked copy path");
  if (pool.shape(2) != out.shape(1) || slots.shape(0) != out.shape(0))
    throw std::invalid_argument("shapes differ");
  const bool dense = pool.shape(2) <= 1 || (pool.stride(2) == 1 && out.stride(1) == 1);
  if (!dense) throw std::invalid_argument("the bytes of a row are not contiguous");
  const tidal::RowPool rows{pool.data(),
                            static_cast<int64_t>(pool.shape(0)),
                            static_cast<int64_t>(pool.shape(1)),
                            pool.stride(0),
                            pool.stride(1),
                            static_cast<int64_t>(pool.shape(2))};
  const auto count = static_cast<int64_t>(slots.shape(0));
  const nb::gil_scoped_release release;
  return tidal::gather_rows(rows, slots.data(), count, out.data(), out.stride(0), threads, way);
}

}  // namespace

void bind_gather(nb::module_& module) {
  module.def(
      "best_path", [] { return static_cast<int>(tidal::best_path()); }, "Best copy path of this processor.");
  module.def(
      "has_path", [](int path) { return tidal::has_path(static_cast<tidal::CopyPath>(path)); },
      nb::arg("path"), "Whether this processor has a copy path.");
  module.def("gather_rows", &gather_rows, nb::arg("pool").noconvert(), nb::arg("slots").noconvert(),
             nb::arg("out").noconvert(), nb::arg("threads"), nb::arg("path"),
             "Copy rows; return -1, or the position of the first slot that is outside the pool.");
}
