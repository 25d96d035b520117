// The tables of tests/layering_test.cpp: which files may include what.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

// Layer -> layers it may include. docs/architecture.md shows the picture.
inline const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"cluster/base", {}},
    {"configs", {"cluster/base"}},
    {"data/batch", {"cluster/base"}},
    {"cluster", {"cluster/base", "configs"}},
    {"data", {"data/batch", "cluster/base", "configs"}},
    {"attention/kernels", {"cluster/base"}},
    {"attention/pytorch", {"attention/kernels", "cluster/base"}},
    {"attention", {"attention/kernels", "cluster/base", "configs"}},
    {"models", {"attention", "attention/kernels", "data/batch", "cluster/base", "configs"}},
    {"runtime", {"models", "data", "data/batch", "cluster", "cluster/base", "configs"}},
    {"launcher",
     {"runtime", "models", "attention", "attention/kernels", "data", "data/batch", "cluster",
      "cluster/base", "configs"}},
};

// External header prefix -> the only files (by prefix) that may include it.
inline const std::map<std::string, std::vector<std::string>> kDoors = {
    {"hdf5", {"data/corpus/hdf5"}},
    {"H5", {"data/corpus/hdf5"}},
    {"mpi.h",
     {"cluster/world", "cluster/mpi_group", "cluster/mpi_check", "launcher/bench/mpi_peer"}},
    {"sentencepiece", {"data/tokenizers/"}},
    {"png.h", {"data/images/png", "launcher/commands/image_grid"}},
    {"jpeglib.h", {"data/images/jpeg"}},
    {"minizip/", {"data/images/npz"}},
    {"zlib.h", {"data/images/image_array", "data/text/text_file"}},
    {"zstd.h", {"data/text/text_file"}},
    {"torch/torch.h", {}},
    {"nccl.h", {"cluster/nccl_group", "launcher/bench/nccl_peer"}},
    {"cuda", {"cluster/base/gpu/"}},
    {"c10/cuda/",
     {"cluster/nccl_group", "cluster/base/gpu/device", "runtime/device_prefetcher",
      "runtime/step_graph"}},
    {"ATen/cuda/", {"runtime/step_graph"}},
};

// Package required by cmake/Dependencies.cmake -> the start of an include that shows its use.
// Empty: a tool, or a library that other packages need.
inline const std::map<std::string, std::string> kIncludedAs = {
    {"Threads", "thread"},
    {"Protobuf", "google/protobuf/"},
    {"ZLIB", "zlib.h"},
    {"zstd", "zstd.h"},
    {"PNG", "png.h"},
    {"JPEG", "jpeglib.h"},
    {"minizip", "minizip/"},
    {"MPI", "mpi.h"},
    {"HDF5", "hdf5.h"},
    {"PkgConfig", ""},
    {"sentencepiece", "sentencepiece"},
    {"fmt", "fmt/"},
    {"CLI11", "CLI/"},
    {"nlohmann_json", "nlohmann/"},
    {"XXHASH_INCLUDE_DIR", "xxhash.h"},
    {"GTest", "gtest/"},
    {"RAPIDCHECK_INCLUDE_DIR", "rapidcheck"},
    {"CUDA_RUNTIME_INCLUDE_DIR", "cuda_runtime"},
    {"NCCL_INCLUDE_DIR", "nccl.h"}};
