// The folders' arrows, the size of files, and the paths that the documents name: rules that hold
// because a machine checks them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

const fs::path kRoot = BIRKHOFF_SOURCE_DIR;

// Layer -> layers it may include. docs/architecture.md shows the picture.
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"cluster/base", {}},
    {"configs", {"cluster/base"}},
    {"data/batch", {"cluster/base"}},
    {"cluster", {"cluster/base", "configs"}},
    {"data", {"data/batch", "cluster/base", "configs"}},
    {"attention", {"cluster/base", "configs"}},
    {"models", {"attention", "data/batch", "cluster/base", "configs"}},
    {"runtime",
     {"models", "attention", "data", "data/batch", "cluster", "cluster/base", "configs"}},
    {"launcher",
     {"runtime", "models", "attention", "data", "data/batch", "cluster", "cluster/base",
      "configs"}},
};

// External header prefix -> the only files (by prefix) that may include it.
const std::map<std::string, std::vector<std::string>> kDoors = {
    {"hdf5", {"data/hdf5"}},
    {"H5", {"data/hdf5"}},
    {"mpi.h",
     {"cluster/world", "cluster/mpi_group", "cluster/mpi_check", "launcher/bench/mpi_peer"}},
    {"sentencepiece", {"data/"}},
    {"torch/torch.h", {}},
    {"nccl.h", {"cluster/nccl_group", "launcher/bench/nccl_peer"}},
    {"cuda", {"cluster/base/cuda/", "cluster/base/device"}},
    {"c10/cuda/",
     {"cluster/nccl_group", "cluster/base/device", "runtime/device_feed", "runtime/step_graph"}},
    {"ATen/cuda/", {"runtime/step_graph"}},
};

// Kernels, and the headers that they share with the .cpp beside them: no LibTorch.
const std::regex kKernelFiles(
    R"(.*\.cuh?$|.*_params\.h$|attention/block_attention_(tiles|body|forward|backward)\.h)"
    R"(|cluster/base/(reduce_op|philox_rounds)\.h|cluster/base/cuda/.*)");

std::string layer_of(const std::string& path) {
  std::string best;
  for (const auto& [layer, allowed] : kMayInclude) {
    if (path.rfind(layer + "/", 0) == 0 && layer.size() > best.size()) best = layer;
  }
  return best;
}

std::vector<fs::path> sources(const std::vector<std::string>& folders) {
  std::vector<fs::path> files;
  for (const std::string& folder : folders) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const std::string extension = entry.path().extension();
      if (extension == ".h" || extension == ".cpp" || extension == ".cu" || extension == ".cuh")
        files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

const std::vector<std::string> kFolders = {"attention", "cluster", "configs", "data",
                                           "launcher",  "models",  "runtime"};

TEST(Layering, FoldersIncludeOnlyWhatTheyMay) {
  const std::regex ours("^\\s*#include \"([^\"]+)\"");
  int checked = 0;
  for (const fs::path& file : sources(kFolders)) {
    const std::string path = fs::relative(file, kRoot);
    const std::string layer = layer_of(path);
    ASSERT_FALSE(layer.empty()) << path << " lies in no layer";
    std::ifstream in(file);
    std::string line;
    while (std::getline(in, line)) {
      std::smatch match;
      if (!std::regex_search(line, match, ours)) continue;
      const std::string target = layer_of(match[1]);
      ASSERT_FALSE(target.empty()) << path << ": includes are written from the root: " << line;
      EXPECT_TRUE(target == layer || kMayInclude.at(layer).count(target) == 1)
          << path << " (" << layer << ") may not include " << match[1] << " (" << target << ")";
      ++checked;
    }
  }
  EXPECT_GT(checked, 100);
}

TEST(Layering, EveryExternalPackageHasOneDoor) {
  const std::regex external("^\\s*#include <([^>]+)>");
  for (const fs::path& file : sources(kFolders)) {
    const std::string path = fs::relative(file, kRoot);
    std::ifstream in(file);
    std::string line;
    while (std::getline(in, line)) {
      std::smatch match;
      if (!std::regex_search(line, match, external)) continue;
      for (const auto& [prefix, doors] : kDoors) {
        if (match[1].str().rfind(prefix, 0) != 0) continue;
        EXPECT_TRUE(std::any_of(doors.begin(), doors.end(),
                                [&](const std::string& door) { return path.rfind(door, 0) == 0; }))
            << path << " may not include <" << match[1] << ">";
      }
    }
  }
}

TEST(Layering, KernelsKnowNoLibTorch) {
  const std::regex libtorch("^\\s*#include <(ATen|c10|torch)/");
  int checked = 0;
  for (const fs::path& file : sources(kFolders)) {
    if (!std::regex_match(fs::relative(file, kRoot).string(), kKernelFiles)) continue;
    std::ifstream in(file);
    std::string line;
    while (std::getline(in, line)) {
      EXPECT_FALSE(std::regex_search(line, libtorch)) << fs::relative(file, kRoot) << ": " << line;
    }
    ++checked;
  }
  EXPECT_GT(checked, 10);
}

TEST(Layering, NoFileIsLongerThan500Lines) {
  for (const fs::path& file : sources(
           {"attention", "cluster", "configs", "data", "launcher", "models", "runtime", "tests"})) {
    std::ifstream in(file);
    const auto lines =
        std::count(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>(), '\n');
    EXPECT_LE(lines, 500) << fs::relative(file, kRoot) << " has more than one subject?";
  }
}

TEST(Layering, PathsNamedInDocumentsExist) {
  const std::regex name(
      "`((?:attention|cluster|configs|data|docs|launcher|models|runtime|tests|cmake)/[A-Za-z0-9_./"
      "-]+)`");
  std::vector<fs::path> documents = {kRoot / "README.md"};
  for (const auto& entry : fs::directory_iterator(kRoot / "docs")) {
    if (entry.path().extension() == ".md") documents.push_back(entry.path());
  }
  int checked = 0;
  for (const fs::path& document : documents) {
    std::ifstream in(document);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    for (auto match = std::sregex_iterator(text.begin(), text.end(), name);
         match != std::sregex_iterator(); ++match) {
      std::string path = (*match)[1];
      while (!path.empty() && path.back() == '.') path.pop_back();
      const bool unit = fs::exists(kRoot / (path + ".h")) ||
                        fs::exists(kRoot / (path + ".cpp"));  // `runtime/trainer` names the pair
      EXPECT_TRUE(fs::exists(kRoot / path) || unit)
          << fs::relative(document, kRoot) << " names " << path << ", which does not exist";
      ++checked;
    }
  }
  EXPECT_GT(checked, 20);
}

}  // namespace
