#include "data/corpus/hdf5.h"

#include <hdf5.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cluster/base/error.h"
#include "cluster/base/unique_handle.h"

namespace birkhoff {
namespace {

// Values are written, and read with pread, in the byte order of memory.
static_assert(std::endian::native == std::endian::little);

template <herr_t (*Close)(hid_t)>
struct IdTraits {
  using Handle = hid_t;
  static Handle null() { return H5I_INVALID_HID; }
  static void close(Handle id) noexcept { Close(id); }
};
using FileId = UniqueHandle<IdTraits<H5Fclose>>;
using SpaceId = UniqueHandle<IdTraits<H5Sclose>>;
using SetId = UniqueHandle<IdTraits<H5Dclose>>;
using ListId = UniqueHandle<IdTraits<H5Pclose>>;
using TypeId = UniqueHandle<IdTraits<H5Tclose>>;

// The innermost message of the library's error stack.
std::string reason() {
  std::string text = "unknown reason";
  const auto visit = [](unsigned, const H5E_error2_t* error, void* out) -> herr_t {
    *static_cast<std::string*>(out) = fmt::format("{}: {}", error->func_name, error->desc);
    return 1;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, visit, &text);
  return text;
}

// Negative results are errors, for ids, herr_t, htri_t and sizes alike.
template <typename Result>
Result checked(Result result, const char* call) {
  if (result < 0) fail(ExitCode::kInternal, "internal error: HDF5 {} failed: {}", call, reason());
  return result;
}

hid_t file_type(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kU8:
      return H5T_STD_U8LE;
    case Hdf5Type::kU16:
      return H5T_STD_U16LE;
    case Hdf5Type::kI32:
      return H5T_STD_I32LE;
    case Hdf5Type::kU32:
      return H5T_STD_U32LE;
    case Hdf5Type::kU64:
      return H5T_STD_U64LE;
    case Hdf5Type::kF32:
      return H5T_IEEE_F32LE;
  }
  require(false, "HDF5 type");
  return H5I_INVALID_HID;
}

std::vector<hsize_t> dims(const Hdf5DataSet& data_set) {
  return {data_set.shape.begin(), data_set.shape.end()};
}

bool is_empty(const Hdf5DataSet& data_set) {
  return std::ranges::find(data_set.shape, 0) != data_set.shape.end();
}

std::int64_t data_offset(hid_t set, const Hdf5DataSet& data_set) {
  if (is_empty(data_set)) return 0;
  const haddr_t address = H5Dget_offset(set);
  if (address == HADDR_UNDEF)
    fail(ExitCode::kInternal, "internal error: HDF5 H5Dget_offset failed: {}", reason());
  return static_cast<std::int64_t>(address);
}

ListId file_access() {
  ListId access(checked(H5Pcreate(H5P_FILE_ACCESS), "H5Pcreate"));
  // The latest format has checksums for all metadata.
  checked(H5Pset_libver_bounds(access.get(), H5F_LIBVER_LATEST, H5F_LIBVER_LATEST),
          "H5Pset_libver_bounds");
  return access;
}

// The library keeps a file image in this memory while the file is open, and hands it over when the
// file is closed. Only then is the image complete (H5Fget_file_image of HDF5 1.10 returns
// superblocks with a wrong checksum). The memory is zeroed, because gaps that the library leaves
// unwritten must neither leak memory contents nor make equal files differ.
struct ImageMemory {
  char* data = nullptr;
  std::size_t bytes = 0;
  ~ImageMemory() { std::free(data); }
};

void* image_malloc(std::size_t bytes, H5FD_file_image_op_t, void* memory) {
  static_cast<ImageMemory*>(memory)->bytes = bytes;
  return std::calloc(bytes, 1);
}

void* image_realloc(void* image, std::size_t bytes, H5FD_file_image_op_t, void* memory) {
  std::size_t& old_bytes = static_cast<ImageMemory*>(memory)->bytes;
  auto* moved = static_cast<char*>(std::realloc(image, bytes));
  if (moved == nullptr) return nullptr;
  if (bytes > old_bytes) std::memset(moved + old_bytes, 0, bytes - old_bytes);
  old_bytes = bytes;
  return moved;
}

herr_t image_free(void* image, H5FD_file_image_op_t operation, void* memory) {
  if (operation == H5FD_FILE_IMAGE_OP_FILE_CLOSE) {
    static_cast<ImageMemory*>(memory)->data = static_cast<char*>(image);
  } else {
    std::free(image);
  }
  return 0;
}

ListId memory_access(ImageMemory& memory) {
  ListId access = file_access();
  constexpr std::size_t kGrowthBytes = 4 << 20;
  checked(H5Pset_fapl_core(access.get(), kGrowthBytes, /*backing_store=*/0), "H5Pset_fapl_core");
  checked(H5Pset_alignment(access.get(), 4096, 4096), "H5Pset_alignment");
  H5FD_file_image_callbacks_t callbacks = {};
  callbacks.image_malloc = image_malloc;
  callbacks.image_realloc = image_realloc;
  callbacks.image_free = image_free;
  callbacks.udata_copy = [](void* same) { return same; };
  callbacks.udata_free = [](void*) -> herr_t { return 0; };
  callbacks.udata = &memory;
  checked(H5Pset_file_image_callbacks(access.get(), &callbacks), "H5Pset_file_image_callbacks");
  return access;
}

// The memory grows in steps; the superblock (versions 2 and 3: byte 28) says where the file ends.
std::string used_part(const ImageMemory& memory) {
  std::uint64_t end_of_file = 0;
  require(memory.data != nullptr && memory.bytes >= 48, "HDF5 hands over the file image");
  std::memcpy(&end_of_file, memory.data + 28, 8);
  require(end_of_file <= memory.bytes, "the end of an HDF5 file is within its image");
  return std::string(memory.data, end_of_file);
}

}  // namespace

std::string hdf5_image(std::vector<Hdf5DataSet>& data_sets) {
  static std::mutex one_at_a_time;  // the library may be built without its own lock
  const std::lock_guard lock(one_at_a_time);
  checked(H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr), "H5Eset_auto2");
  ImageMemory memory;
  const ListId access = memory_access(memory);
  const ListId file_creation(checked(H5Pcreate(H5P_FILE_CREATE), "H5Pcreate"));
  checked(H5Pset_obj_track_times(file_creation.get(), false), "H5Pset_obj_track_times");
  FileId file(
      checked(H5Fcreate("image", H5F_ACC_TRUNC, file_creation.get(), access.get()), "H5Fcreate"));
  ListId creation(checked(H5Pcreate(H5P_DATASET_CREATE), "H5Pcreate"));
  checked(H5Pset_layout(creation.get(), H5D_CONTIGUOUS), "H5Pset_layout");
  checked(H5Pset_obj_track_times(creation.get(), false), "H5Pset_obj_track_times");
  checked(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER), "H5Pset_fill_time");
  for (Hdf5DataSet& data_set : data_sets) {
    const std::vector<hsize_t> sizes = dims(data_set);
    SpaceId space(checked(H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr),
                          "H5Screate_simple"));
    SetId set(checked(H5Dcreate2(file.get(), data_set.name.c_str(), file_type(data_set.type),
                                 space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT),
                      "H5Dcreate2"));
    if (!is_empty(data_set)) {
      checked(H5Dwrite(set.get(), file_type(data_set.type), H5S_ALL, H5S_ALL, H5P_DEFAULT,
                       data_set.data),
              "H5Dwrite");
    }
    data_set.offset = data_offset(set.get(), data_set);
    checked(H5Dclose(set.release()), "H5Dclose");
  }
  checked(H5Fclose(file.release()), "H5Fclose");
  return used_part(memory);
}

void check_hdf5(const std::string& path, const std::vector<Hdf5DataSet>& expected) {
  const auto differs = [&](const std::string& name, const char* what) {
    fail(ExitCode::kData, "{}: HDF5 data set /{}: {}; prepare the corpus again", path, name, what);
  };
  checked(H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr), "H5Eset_auto2");
  const ListId access = file_access();
  const FileId file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()));
  if (!file)
    fail(ExitCode::kData, "{}: not an HDF5 file ({}); prepare the corpus again", path, reason());
  for (const Hdf5DataSet& data_set : expected) {
    const SetId set(H5Dopen2(file.get(), data_set.name.c_str(), H5P_DEFAULT));
    if (!set) differs(data_set.name, "missing or damaged");
    const TypeId type(checked(H5Dget_type(set.get()), "H5Dget_type"));
    if (H5Tequal(type.get(), file_type(data_set.type)) <= 0)
      differs(data_set.name, "has a different type");
    const SpaceId space(checked(H5Dget_space(set.get()), "H5Dget_space"));
    std::vector<hsize_t> sizes(H5S_MAX_RANK);
    const int rank = H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr);
    sizes.resize(static_cast<std::size_t>(std::max(rank, 0)));
    if (sizes != dims(data_set)) {
      differs(data_set.name, "has a different size than the manifest says");
    }
    const ListId creation(checked(H5Dget_create_plist(set.get()), "H5Dget_create_plist"));
    if (H5Pget_layout(creation.get()) != H5D_CONTIGUOUS ||
        H5Pget_external_count(creation.get()) != 0) {
      differs(data_set.name, "is not contiguous in this file");
    }
    if (data_offset(set.get(), data_set) != data_set.offset) {
      differs(data_set.name, "is at a different offset than the manifest says");
    }
  }
}

namespace {

// Whether all values were written; the library reads others as 0.
bool is_complete(const SetId& set, const ListId& creation, const std::vector<hsize_t>& sizes) {
  H5D_space_status_t status = H5D_SPACE_STATUS_ERROR;
  if (H5Dget_space_status(set.get(), &status) < 0) return false;
  if (H5Pget_layout(creation.get()) != H5D_CHUNKED) {
    return status == H5D_SPACE_STATUS_ALLOCATED || H5Pget_layout(creation.get()) == H5D_COMPACT;
  }
  std::vector<hsize_t> chunk(sizes.size());
  hsize_t expected = 1, found = 0;
  if (H5Pget_chunk(creation.get(), static_cast<int>(chunk.size()), chunk.data()) < 0) return false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (chunk[i] == 0) return false;
    expected *= (sizes[i] + chunk[i] - 1) / chunk[i];
  }
  const SpaceId space(H5Dget_space(set.get()));  // 1.10 takes no H5S_ALL here
  return H5Dget_num_chunks(set.get(), space.get(), &found) >= 0 && found == expected;
}

// Opens a data set and finds its shape. No other file is opened for it.
SetId open_foreign(hid_t file, const std::string& name, H5T_class_t kind, Interval dimensions,
                   std::int64_t max_values, std::vector<std::int64_t>& shape) {
  H5L_info_t link = {};
  reject_if(H5Lexists(file, name.c_str(), H5P_DEFAULT) <= 0, "has no data set '{}'", name);
  reject_if(H5Lget_info(file, name.c_str(), &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD,
            "its '{}' is a link; copy the data set to its place", name);
  SetId set(H5Dopen2(file, name.c_str(), H5P_DEFAULT));
  reject_if(!set, "its data set '{}' cannot be opened ({})", name, reason());
  const TypeId type(H5Dget_type(set.get()));
  const bool is_float = kind == H5T_FLOAT;
  reject_if(!type || H5Tget_class(type.get()) != kind ||
                (is_float ? H5Tget_size(type.get()) != 4 : H5Tget_size(type.get()) > 8),
            "its data set '{}' is not of {}", name,
            is_float ? "32-bit floating-point numbers" : "integers of at most 64 bits");
  const ListId creation(H5Dget_create_plist(set.get()));
  reject_if(!creation || H5Pget_external_count(creation.get()) != 0 ||
                H5Pget_layout(creation.get()) == H5D_VIRTUAL,
            "the values of its data set '{}' are in another file; copy them into this one", name);
  const SpaceId space(H5Dget_space(set.get()));
  const int rank = !space ? -1 : H5Sget_simple_extent_ndims(space.get());
  reject_if(rank < dimensions.begin || rank >= dimensions.end,
            "its data set '{}' has {} dimensions, not {}", name, rank, dimensions.end - 1);
  std::vector<hsize_t> sizes(static_cast<std::size_t>(rank));
  reject_if(H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr) != rank,
            "its data set '{}' has no shape ({})", name, reason());
  std::int64_t count = 1;
  for (const hsize_t size : sizes) {
    const bool fits = size <= static_cast<hsize_t>(max_values) &&
                      count * static_cast<std::int64_t>(size) <= max_values;
    reject_if(!fits, "its data set '{}' has more than {} values", name, max_values);
    count *= static_cast<std::int64_t>(size);
    shape.push_back(static_cast<std::int64_t>(size));
  }
  reject_if(count > 0 && !is_complete(set, creation, sizes),
            "its data set '{}' has values that were never written, or is damaged", name);
  return set;
}

template <typename T>
Hdf5Values<T> read_foreign(hid_t file, const std::string& name, H5T_class_t kind, hid_t type,
                           Interval dimensions, std::int64_t max_values) {
  Hdf5Values<T> read;
  const SetId set = open_foreign(file, name, kind, dimensions, max_values, read.shape);
  std::size_t count = 1;
  for (const std::int64_t size : read.shape) count *= static_cast<std::size_t>(size);
  read.values.resize(count);
  if (count == 0) return read;
  reject_if(H5Dread(set.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, read.values.data()) < 0,
            "the values of its data set '{}' are damaged or end early ({})", name, reason());
  return read;
}

}  // namespace

ForeignHdf5::ForeignHdf5(const std::string& path) {
  checked(H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr), "H5Eset_auto2");
  checked(H5PLset_loading_state(0), "H5PLset_loading_state");  // filters in other libraries
  file_ = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  reject_if(file_ < 0, "is not HDF5, or is damaged ({})", reason());
}

ForeignHdf5::~ForeignHdf5() { H5Fclose(file_); }

bool ForeignHdf5::has(const std::string& name) const {
  return H5Lexists(file_, name.c_str(), H5P_DEFAULT) > 0;
}

Hdf5Values<float> ForeignHdf5::floats(const std::string& name, Interval dimensions,
                                      std::int64_t max_values) const {
  return read_foreign<float>(file_, name, H5T_FLOAT, H5T_NATIVE_FLOAT, dimensions, max_values);
}

Hdf5Values<std::int64_t> ForeignHdf5::integers(const std::string& name, Interval dimensions,
                                               std::int64_t max_values) const {
  return read_foreign<std::int64_t>(file_, name, H5T_INTEGER, H5T_NATIVE_INT64, dimensions,
                                    max_values);
}

}  // namespace birkhoff
