// SPDX-License-Identifier: Apache-2.0
// Arrays of Python as the rows and indices that the operators take.

#pragma once

#include <nanobind/ndarray.h>

#include <stdexcept>

#include "tidal/copy.h"

using SourceArray = nanobind::ndarray<const uint8_t, nanobind::ndim<3>, nanobind::device::cpu>;
using DestinationArray = nanobind::ndarray<uint8_t, nanobind::ndim<3>, nanobind::device::cpu>;
using IndexArray =
    nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <class Byte, class Array>
tidal::PagedRows<Byte> rows_of(const Array& array) {
  if (array.shape(2) > 1 && array.stride(2) != 1)
    throw std::invalid_argument("the bytes of a row are not contiguous");
  return {array.data(),
          static_cast<int64_t>(array.shape(0)),
          static_cast<int64_t>(array.shape(1)),
          array.stride(0),
          array.stride(1),
          static_cast<int64_t>(array.shape(2))};
}

inline tidal::CopyPath path_of(int path) {
  const auto way = static_cast<tidal::CopyPath>(path);
  if (!tidal::has_path(way)) throw std::invalid_argument("this processor lacks the asked copy path");
  return way;
}
