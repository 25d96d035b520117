// The only interface to the HDF5 library. HDF5 reports a full disk late or never, so it never
// writes to a disk here: it lays a file out in memory, and checked calls write the bytes. Readers
// read rows at validated offsets, without HDF5.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/interval.h"

namespace birkhoff {

enum class Hdf5Type { kU8, kU16, kI32, kU32, kU64, kF32 };

// A data set, contiguous and uncompressed, little-endian, in C order.
struct Hdf5DataSet {
  std::string name;
  Hdf5Type type;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;  // the values to write; unused by check_hdf5
  std::int64_t offset = 0;     // byte offset of the values in the file; 0 if there are none
};

// Returns the bytes of an HDF5 file that holds these data sets, and sets their offsets. The file
// has the latest format and no time stamps: equal content yields equal bytes. Threads take turns.
// Error(kInternal) with the library's reason if a call fails.
std::string hdf5_image(std::vector<Hdf5DataSet>& data_sets);

// Opens a file with the library and compares names, types, sizes, layouts and offsets. Error(kData)
// names the file and the first difference. Call it only in a child process
// (cluster/base/files/sandboxed_child.h): the library may crash on damaged files.
void check_hdf5(const std::string& path, const std::vector<Hdf5DataSet>& expected);

// A data set that another program has written, compressed or not, with all its values.
template <typename T>
struct Hdf5Values {
  std::vector<std::int64_t> shape;
  std::vector<T> values;  // in C order
};

// A file that another program has written. Use it only in a child process, as check_hdf5().
class ForeignHdf5 {
 public:
  // Here and below, std::invalid_argument says why it cannot be read.
  explicit ForeignHdf5(const std::string& path);
  ~ForeignHdf5();
  ForeignHdf5(const ForeignHdf5&) = delete;
  ForeignHdf5& operator=(const ForeignHdf5&) = delete;

  // Whether the file's root has a data set of this name.
  bool has(const std::string& name) const;
  // The data set of 32-bit floating-point numbers, or of integers of any kind, in the file's root.
  // The number of its dimensions must be in the interval. It must lie in this file and have at most
  // `max_values` values, all of them written.
  Hdf5Values<float> floats(const std::string& name, Interval dimensions,
                           std::int64_t max_values) const;
  Hdf5Values<std::int64_t> integers(const std::string& name, Interval dimensions,
                                    std::int64_t max_values) const;

 private:
  std::int64_t file_;  // the library's id
};

}  // namespace birkhoff
