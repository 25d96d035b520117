// Arrays as bytes that a rank sends to another one, which runs the same program.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "cluster/base/error.h"

namespace birkhoff {

// Appends the number of elements of a vector or string, and the elements.
template <typename Array>
void pack(const Array& array, std::string& bytes) {
  const auto count = static_cast<std::uint64_t>(array.size());
  bytes.append(reinterpret_cast<const char*>(&count), sizeof count);
  if (count > 0) bytes.append(reinterpret_cast<const char*>(array.data()), count * sizeof array[0]);
}

// Removes and returns the array at the front. Error(kInternal) if the bytes end before.
template <typename Array>
Array unpack(std::string_view& bytes) {
  std::uint64_t count = 0;
  require(bytes.size() >= sizeof count, "packed bytes are whole");
  std::memcpy(&count, bytes.data(), sizeof count);
  bytes.remove_prefix(sizeof count);
  require(count <= bytes.size() / sizeof(typename Array::value_type), "packed bytes are whole");
  Array array(count, {});
  const std::size_t size = count * sizeof array[0];
  if (size > 0) std::memcpy(array.data(), bytes.data(), size);
  bytes.remove_prefix(size);
  return array;
}

}  // namespace birkhoff
