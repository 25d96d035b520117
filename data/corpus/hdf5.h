// The only interface to the HDF5 library. HDF5 reports a full disk late or never, so it never
// writes to a disk here: it lays a file out in memory, and checked calls write the bytes. Readers
// read rows at validated offsets, without HDF5.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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

}  // namespace birkhoff
