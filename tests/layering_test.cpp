// Tests the structure of the sources: includes between folders, file names and lengths, and paths
// in documents. Each rule is a function of a tree, so that it can also be tested on trees that
// break it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>  // mkdtemp

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/layering_tables.h"

namespace fs = std::filesystem;

namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

using Findings = std::vector<std::string>;

constexpr int kMaxFiles = 25, kMinLines = 15, kMaxLines = 500;
constexpr std::size_t kMaxColumns = 100;

std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// The first group of each match.
std::vector<std::string> matches(const std::string& text, const std::regex& regex) {
  return {std::sregex_token_iterator(text.begin(), text.end(), regex, 1), {}};
}

// What asks for a member of a message's oneof: has_sinkhorn(), Mechanism::kSinkhorn.
std::regex asks_for(const std::string& schema, const std::string& message) {
  const std::string text = text_of(fs::path(BIRKHOFF_SOURCE_DIR) / "configs/schema" / schema);
  const std::size_t begin = text.find("message " + message + " {");
  const std::string oneof = text.substr(begin, text.find("  }", begin) - begin);
  static const std::regex kMember("\n    (?:\\w+) (\\w+) = \\d+");
  std::string names = "none";
  for (const std::string& name : matches(oneof, kMember)) names += "|" + name;
  return std::regex("\\b(has|mutable)_(" + names + ")\\b|\\b" + message + "::k[A-Z]");
}

// A tree of sources.
class Tree {
 public:
  explicit Tree(fs::path root) : root_(std::move(root)) {
    for (const char* folder :
         {"attention", "cluster", "configs", "data", "launcher", "models", "runtime", "tests"}) {
      if (!fs::exists(root_ / folder)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(root_ / folder)) {
        static const std::set<std::string> kSources = {".h", ".cpp", ".cu", ".cuh"};
        if (!kSources.contains(entry.path().extension())) continue;
        texts_[fs::relative(entry.path(), root_).string()] = text_of(entry.path());
      }
    }
  }

  const fs::path& root() const { return root_; }
  // Path from the root -> text.
  const std::map<std::string, std::string>& texts() const { return texts_; }
  std::map<std::string, std::string> product() const {
    std::map<std::string, std::string> found = texts_;
    std::erase_if(found, [](const auto& file) { return file.first.starts_with("tests/"); });
    return found;
  }

  // Includes in quotes, or in angle brackets.
  static std::vector<std::string> includes(const std::string& text, bool quoted) {
    static const std::regex kQuoted("(?:^|\n)\\s*#include \"([^\"]+)\""),
        kAngled("(?:^|\n)\\s*#include <([^>]+)>");
    return matches(text, quoted ? kQuoted : kAngled);
  }

 private:
  fs::path root_;
  std::map<std::string, std::string> texts_;
};

std::string layer_of(const std::string& path) {
  std::string best;
  for (const auto& [layer, allowed] : kMayInclude) {
    if (path.rfind(layer + "/", 0) == 0 && layer.size() > best.size()) best = layer;
  }
  return best;
}

bool is_in(const std::string& path, const std::vector<std::string>& prefixes) {
  return std::ranges::any_of(prefixes,
                             [&](const auto& prefix) { return path.starts_with(prefix); });
}

std::string folder_of(const std::string& path) { return fs::path(path).parent_path().string(); }

bool is_instantiation(const std::string& path) {
  return path.find("/instantiations/") != std::string::npos ||
         path.find(".simd.cpp") != std::string::npos;
}

// ---- Rules.

Findings layers(const Tree& tree) {
  Findings findings;
  for (const auto& [path, text] : tree.product()) {
    const std::string layer = layer_of(path);
    if (layer.empty()) findings.push_back(path + " is in no layer");
    if (layer.empty()) continue;
    for (const std::string& include : Tree::includes(text, /*quoted=*/true)) {
      const std::string target = layer_of(include);
      if (target != layer && kMayInclude.at(layer).count(target) == 0)
        findings.push_back(path + " may not include " + include);
    }
  }
  return findings;
}

// Folders that reach themselves through the includes of the files directly in them.
Findings folder_cycles(const Tree& tree) {
  std::map<std::string, std::map<std::string, std::string>> arrows;  // folder -> folder -> why
  for (const auto& [path, text] : tree.product()) {
    for (const std::string& include : Tree::includes(text, /*quoted=*/true)) {
      const std::string from = folder_of(path), to = folder_of(include);
      if (from != to) arrows[from].emplace(to, path + " includes " + include);
    }
  }
  Findings findings;
  for (const auto& [start, first] : arrows) {
    std::set<std::string> seen;
    std::string why;
    const std::function<bool(const std::string&)> reaches_start = [&](const std::string& folder) {
      if (!seen.insert(folder).second) return false;
      for (const auto& [next, reason] : arrows[folder]) {
        if (next == start || reaches_start(next)) {
          why = reason + (why.empty() ? "" : "; ") + why;
          return true;
        }
      }
      return false;
    };
    if (reaches_start(start)) findings.push_back(start + " includes itself: " + why);
  }
  return findings;
}

Findings doors(const Tree& tree) {
  Findings findings;
  for (const auto& [path, text] : tree.product()) {
    for (const std::string& include : Tree::includes(text, /*quoted=*/false)) {
      for (const auto& [prefix, allowed] : kDoors) {
        if (include.rfind(prefix, 0) != 0) continue;
        if (!is_in(path, allowed)) findings.push_back(path + " may not include <" + include + ">");
      }
    }
  }
  return findings;
}

// Kernel sources, and all headers that they include.
Findings kernels_know_no_libtorch(const Tree& tree) {
  std::set<std::string> reached;
  const std::function<void(const std::string&)> reach = [&](const std::string& path) {
    if (tree.texts().count(path) == 0 || !reached.insert(path).second) return;
    for (const auto& include : Tree::includes(tree.texts().at(path), /*quoted=*/true)) {
      reach(include);
    }
  };
  for (const auto& [path, text] : tree.product()) {
    if (path.ends_with(".cu") || path.ends_with(".cuh") || path.ends_with(".simd.cpp")) reach(path);
  }
  Findings findings;
  for (const std::string& path : reached) {
    for (const auto& include : Tree::includes(tree.texts().at(path), /*quoted=*/false)) {
      if (include.rfind("ATen/", 0) == 0 || include.rfind("c10/", 0) == 0 ||
          include.rfind("torch/", 0) == 0) {
        findings.push_back(path + ", which a kernel includes, includes <" + include + ">");
      }
    }
  }
  return findings;
}

// The name of a kernel's file shows its device.
Findings device_prefixes(const Tree& tree) {
  Findings findings;
  for (const auto& [path, text] : tree.product()) {
    const std::string name = fs::path(path).filename(), extension = fs::path(path).extension();
    const bool in_gpu = folder_of(path) == "cluster/base/gpu";
    if ((extension == ".cu" || extension == ".cuh") && name.rfind("gpu_", 0) != 0 && !in_gpu)
      findings.push_back(path + " is for GPUs: call it gpu_" + name);
    if (path.find(".simd.cpp") != std::string::npos && name.rfind("cpu_", 0) != 0)
      findings.push_back(path + " is for CPUs: call it cpu_" + name);
  }
  return findings;
}

Findings sizes(const Tree& tree) {
  Findings findings;
  std::map<std::string, int> files;
  for (const auto& [path, text] : tree.texts()) {
    const auto lines = std::count(text.begin(), text.end(), '\n');
    const bool product = path.rfind("tests/", 0) != 0;
    if (lines > kMaxLines)
      findings.push_back(path + ": " + std::to_string(lines) + " lines: more than one subject?");
    if (product && lines < kMinLines && !is_instantiation(path))
      findings.push_back(path + ": " + std::to_string(lines) + " lines: part of which file?");
    ++files[folder_of(path)];
  }
  for (const auto& [folder, count] : files) {
    if (count > kMaxFiles)
      findings.push_back(folder + ": " + std::to_string(count) + " files: more than one purpose?");
  }
  return findings;
}

// clang-format leaves the lines of comments as they are.
Findings wide_comments(const Tree& tree) {
  static const std::regex kWide("(?:^|\n)( *//[^\n]*)");
  Findings findings;
  for (const auto& [path, text] : tree.texts()) {
    for (const std::string& line : matches(text, kWide)) {
      if (line.size() > kMaxColumns) findings.push_back(path + " has a wide comment: " + line);
    }
  }
  return findings;
}

// Other files than these that ask for a member of a oneof.
Findings asked_outside(const Tree& tree, const std::regex& asks,
                       const std::vector<std::string>& places) {
  Findings findings;
  for (const auto& [path, text] : tree.product()) {
    if (is_in(path, places)) continue;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      // Strings and comments may: users read and type them.
      static const std::regex kWords("\"(?:[^\"\\\\]|\\\\.)*\"|//.*");
      if (std::regex_search(std::regex_replace(line, kWords, ""), asks))
        findings.push_back(path + " asks for a kind: " + line);
    }
  }
  return findings;
}

Findings dependencies_are_used(const Tree& tree) {
  Findings findings;
  const std::string cmake = text_of(tree.root() / "cmake/Dependencies.cmake");
  const std::regex required(
      "(?:find_package|find_path|pkg_check_modules)\\((\\w+)[^)]*REQUIRED[^)]*\\)");
  for (const std::string& package : matches(cmake, required)) {
    const auto known = kIncludedAs.find(package);
    if (known == kIncludedAs.end()) {
      findings.push_back(package + " is required: add to layering_test how it is included");
      continue;
    }
    const bool used = std::any_of(tree.texts().begin(), tree.texts().end(), [&](const auto& file) {
      const auto found = Tree::includes(file.second, /*quoted=*/false);
      return std::any_of(found.begin(), found.end(), [&](const std::string& include) {
        return include.rfind(known->second, 0) == 0;
      });
    });
    if (!known->second.empty() && !used)
      findings.push_back(package + " is required but included nowhere");
  }
  return findings;
}

// Paths in backquotes, relative to the root, and pictures.
Findings paths_in_documents(const Tree& tree) {
  static const std::regex kPath(
      "`((?:attention|cluster|configs|data|docs|launcher|models|runtime|tests|cmake)/[A-Za-z0-9_./"
      "-]+)`");
  static const std::regex kPicture(R"(!\[[^\]]*\]\(([^)]+)\))");  // relative to the document
  Findings findings;
  std::vector<fs::path> documents;
  for (auto entry = fs::recursive_directory_iterator(tree.root());
       entry != fs::recursive_directory_iterator(); ++entry) {
    const std::string name = entry->path().filename();
    if (entry->is_directory() && (name == "build" || name[0] == '.')) {
      entry.disable_recursion_pending();
    } else if (entry->path().extension() == ".md") {
      documents.push_back(entry->path());
    }
  }
  for (const fs::path& document : documents) {
    const std::string text = text_of(document);
    for (std::string path : matches(text, kPath)) {
      while (!path.empty() && path.back() == '.') path.pop_back();
      // `runtime/trainer` means the .h and the .cpp.
      const bool exists = fs::exists(tree.root() / path) ||
                          fs::exists(tree.root() / (path + ".h")) ||
                          fs::exists(tree.root() / (path + ".cpp"));
      if (!exists)
        findings.push_back(fs::relative(document, tree.root()).string() + " names " + path);
    }
    for (const std::string& picture : matches(text, kPicture)) {
      if (!fs::exists(document.parent_path() / picture))
        findings.push_back(fs::relative(document, tree.root()).string() + " shows " + picture);
    }
  }
  return findings;
}

// ---- The real tree, and trees that each break one rule.

const Tree& our_tree() {
  static const Tree tree(BIRKHOFF_SOURCE_DIR);
  return tree;
}

class BrokenTree {
 public:
  using Files = std::map<std::string, std::string>;
  explicit BrokenTree(const Files& files) {
    for (const auto& [path, text] : files) {
      fs::create_directories((root_ / path).parent_path());
      std::ofstream(root_ / path) << text;
    }
  }
  ~BrokenTree() { fs::remove_all(root_); }
  BrokenTree(const BrokenTree&) = delete;
  BrokenTree& operator=(const BrokenTree&) = delete;

  Tree tree() const { return Tree(root_); }

 private:
  fs::path root_ = [] {
    std::string name = testing::TempDir() + "/layering_XXXXXX";
    return fs::path(mkdtemp(name.data()));
  }();
};

std::string lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += "//\n";
  return text;
}

TEST(Layering, TheTreeIsNotEmpty) { EXPECT_GT(our_tree().product().size(), 200u); }

TEST(Layering, FoldersIncludeOnlyWhatTheyMay) {
  EXPECT_THAT(layers(our_tree()), IsEmpty());
  const BrokenTree broken({{"models/x.h", "#include \"runtime/trainer.h\"\n"}, {"data/y.h", ""}});
  EXPECT_THAT(layers(broken.tree()), Contains(HasSubstr("models/x.h may not include runtime/")));
}

TEST(Layering, NoFolderIncludesItselfByWayOfOthers) {
  EXPECT_THAT(folder_cycles(our_tree()), IsEmpty());
  const BrokenTree broken({{"runtime/a/x.h", "#include \"runtime/b/y.h\"\n"},
                           {"runtime/b/y.h", "#include \"runtime/z.h\"\n"},
                           {"runtime/z.h", "#include \"runtime/a/x.h\"\n"}});
  EXPECT_THAT(folder_cycles(broken.tree()),
              Contains(HasSubstr("runtime/b/y.h includes runtime/z.h")));
}

TEST(Layering, EveryExternalPackageHasOneDoor) {
  EXPECT_THAT(doors(our_tree()), IsEmpty());
  const BrokenTree broken(BrokenTree::Files{{"models/x.cpp", "#include <mpi.h>\n"}});
  EXPECT_THAT(doors(broken.tree()), Contains("models/x.cpp may not include <mpi.h>"));
}

TEST(Layering, KernelsKnowNoLibTorch) {
  EXPECT_THAT(kernels_know_no_libtorch(our_tree()), IsEmpty());
  const BrokenTree broken({{"attention/gpu_x.cu", "#include \"attention/x.h\"\n"},
                           {"attention/x.h", "#include <ATen/ATen.h>\n"}});
  EXPECT_THAT(kernels_know_no_libtorch(broken.tree()), Contains(HasSubstr("attention/x.h")));
}

TEST(Layering, KernelsAreCalledByTheirDevice) {
  EXPECT_THAT(device_prefixes(our_tree()), IsEmpty());
  const BrokenTree broken({{"attention/x.cu", ""}, {"attention/y.simd.cpp", ""}});
  EXPECT_THAT(device_prefixes(broken.tree()), Contains(HasSubstr("gpu_x.cu")));
  EXPECT_THAT(device_prefixes(broken.tree()), Contains(HasSubstr("cpu_y.simd.cpp")));
}

TEST(Layering, FilesAndFoldersHaveOneSubject) {
  EXPECT_THAT(sizes(our_tree()), IsEmpty());
  std::map<std::string, std::string> files = {{"models/short.h", lines(14)},
                                              {"models/long.h", lines(501)},
                                              {"attention/instantiations/x.cu", lines(3)}};
  for (int i = 0; i < 26; ++i) files["data/" + std::to_string(i) + ".h"] = lines(20);
  const BrokenTree broken(files);
  EXPECT_THAT(sizes(broken.tree()), testing::UnorderedElementsAre(HasSubstr("models/short.h: 14"),
                                                                  HasSubstr("models/long.h: 501"),
                                                                  HasSubstr("data: 26 files")));
}

TEST(Layering, CommentsFitTheColumns) {
  EXPECT_THAT(wide_comments(our_tree()), IsEmpty());
  const BrokenTree broken({{"models/x.h", "  // " + std::string(96, 'x') + "\n"},
                           {"models/y.h", "// " + std::string(97, 'x') + "\nint x;\n"}});
  EXPECT_THAT(wide_comments(broken.tree()), testing::ElementsAre(HasSubstr("models/x.h has")));
}

TEST(Layering, MechanismsAreNamedInAttentionOnly) {
  const std::regex asks = asks_for("attention.proto", "Mechanism");
  // `bench attention` compares with dense attention.
  const std::vector<std::string> places = {"attention/", "configs/", "launcher/bench/attention"};
  EXPECT_THAT(asked_outside(our_tree(), asks, places), IsEmpty());
  const BrokenTree broken({{"models/x.cpp", "if (config.has_sinkhorn()) return;\n"},
                           {"models/z.cpp", "case configs::Mechanism::kMoba:\n"},
                           {"launcher/y.cpp", "say(\"has_sinkhorn\");  // has_sinkhorn\n"}});
  EXPECT_THAT(asked_outside(broken.tree(), asks, places),
              testing::ElementsAre(HasSubstr("models/x.cpp"), HasSubstr("models/z.cpp")));
}

TEST(Layering, TasksAreNamedInTheirFolderOnly) {
  const std::regex asks = asks_for("task.proto", "Task");
  EXPECT_THAT(asked_outside(our_tree(), asks, {"runtime/tasks/", "configs/"}), IsEmpty());
  const BrokenTree broken({{"runtime/x.cpp", "if (task.has_translation()) return;\n"},
                           {"launcher/y.cpp", "case configs::Task::kLanguageModel:\n"}});
  EXPECT_THAT(asked_outside(broken.tree(), asks, {"runtime/tasks/"}), testing::SizeIs(2));
}

TEST(Layering, EveryRequiredDependencyIsIncluded) {
  EXPECT_THAT(dependencies_are_used(our_tree()), IsEmpty());
  const BrokenTree broken(BrokenTree::Files{
      {"cmake/Dependencies.cmake", "find_package(fmt REQUIRED)\nfind_package(spdlog REQUIRED)\n"}});
  EXPECT_THAT(dependencies_are_used(broken.tree()),
              testing::UnorderedElementsAre(HasSubstr("fmt is required but included nowhere"),
                                            HasSubstr("spdlog is required: add")));
}

TEST(Layering, PathsNamedInDocumentsExist) {
  EXPECT_THAT(paths_in_documents(our_tree()), IsEmpty());
  const BrokenTree broken(
      {{"docs/deep/x.md",
        "see `runtime/y`, `runtime/z` and `runtime/w.h`. ![a](y.svg) ![b](z.svg)"},
       {"docs/deep/y.svg", ""},
       {"runtime/y.cpp", ""}});
  EXPECT_THAT(paths_in_documents(broken.tree()),
              testing::UnorderedElementsAre("docs/deep/x.md names runtime/z",
                                            "docs/deep/x.md names runtime/w.h",
                                            "docs/deep/x.md shows z.svg"));
}

}  // namespace
