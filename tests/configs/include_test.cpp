// Files and their includes.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>

#include "cluster/base/files/file.h"
#include "helpers.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

TEST(Include, LaterValuesReplaceMessagesMergeListsReplace) {
  const TemporaryFolder folder;
  folder.write("base.txtpb", R"(
    task { language_model { stream: "a" } }
    train { steps: 7 seed: 8 optimizer { adafactor { clip_update: 2 } } }
    model { heads: 8 attention { group { heads: 2 } group { heads: 6 } } attention {} })");
  folder.write("second.txtpb", "train { steps: 9 } metrics { every: 3 }");
  const fs::path file = folder.write("run.txtpb", R"(
    include: "base.txtpb"
    include: "second.txtpb"
    train { optimizer { adamw { beta1: 0.5 } } }
    model { attention { group { mechanism { block_local {} } } } })");
  const configs::Config config = load_config(file, {});
  EXPECT_EQ(config.task().language_model().stream(), "a");
  EXPECT_EQ(config.train().steps(), 9);
  EXPECT_EQ(config.train().seed(), 8u);
  EXPECT_EQ(config.metrics().every(), 3);
  EXPECT_FLOAT_EQ(config.train().optimizer().adamw().beta1(), 0.5f);
  ASSERT_EQ(config.model().attention_size(), 1);
  ASSERT_EQ(config.model().attention(0).group_size(), 1);
  EXPECT_EQ(config.model().attention(0).group(0).heads(), 8);
  EXPECT_TRUE(config.model().attention(0).group(0).mechanism().has_block_local());
  EXPECT_EQ(config.include_size(), 0);
}

// A file says what to train; the same value is fine where a trained model is evaluated.
TEST(Include, ValuesOnlyForEvaluationAreRefused) {
  const TemporaryFolder folder;
  const std::string text = std::string(kTask) +
                           "model { attention { group { mechanism {\n"
                           "  routing { causal_selection: prefix_topw } } } } }";
  const fs::path file = folder.write("run.txtpb", text);
  const std::string what = config_error([&] { load_config(file, {}); });
  EXPECT_THAT(what, StartsWith(file.string() + ":3:13: model.attention.0.group.0.mechanism.routing."
                                               "causal_selection: prefix_topw"));
  EXPECT_EQ(parse_config(text, "text", {})
                .model()
                .attention(0)
                .group(0)
                .mechanism()
                .routing()
                .causal_selection(),
            configs::RoutingAttention::prefix_topw);

  const fs::path measures =
      folder.write("measures.txtpb", std::string(kTask) +
                                         "model { attention { group { mechanism {\n"
                                         "  routing { measure_dense_mass: true } } } } }");
  const std::string field = "model.attention.0.group.0.mechanism.routing.measure_dense_mass";
  EXPECT_EQ(config_error([&] { load_config(measures, {}); }),
            measures.string() + ":3:13: " + field +
                ": is only for evaluation; train without it, then use `birkhoff eval RUN --set " +
                field + "=true`");
  load_config(measures, {field + "=false"});
}

TEST(Include, ChosenMemberOfAOneofIsMergedIfItIsTheSame) {
  const TemporaryFolder folder;
  folder.write("base.txtpb", std::string(kTask) + "train { optimizer { adamw { beta1: 0.5 } } }");
  const fs::path file = folder.write(
      "run.txtpb", "include: \"base.txtpb\" train { optimizer { adamw { beta2: 0.6 } } }");
  const configs::Config config = load_config(file, {});
  const configs::AdamW& adamw = config.train().optimizer().adamw();
  EXPECT_FLOAT_EQ(adamw.beta1(), 0.5f);
  EXPECT_FLOAT_EQ(adamw.beta2(), 0.6f);
}

TEST(Include, ErrorsNameTheFileThatSetTheValue) {
  const TemporaryFolder folder;
  const fs::path base =
      folder.write("base.txtpb", std::string(kTask) + "train {\n  steps: 0\n  seed: 3\n}");
  const fs::path file = folder.write("run.txtpb", "include: \"base.txtpb\"\ntrain { seed: 4 }");
  EXPECT_THAT(config_error([&] { load_config(file, {}); }),
              StartsWith(base.string() + ":3:3: train.steps: must be"));
  folder.write("run.txtpb", "include: \"base.txtpb\"\ntrain {\n\n steps: -1 }");
  EXPECT_THAT(config_error([&] { load_config(file, {}); }),
              StartsWith(file.string() + ":4:2: train.steps: must be"));
  // A replaced list leaves none of its old places.
  folder.write("base.txtpb", std::string(kTask) + "model { attention { group { heads: 4 } } }");
  folder.write("run.txtpb", "include: \"base.txtpb\"\nmodel {\n attention { group {} group {} } }");
  EXPECT_THAT(config_error([&] { load_config(file, {}); }),
              StartsWith(file.string() + ":3:14: model.attention.0.group.0.heads: no heads"));
  folder.write("base.txtpb", "task {\n  language_modl {} }");
  EXPECT_THAT(config_error([&] { load_config(file, {}); }),
              StartsWith(base.string() + ":2:3: task.language_modl: unknown field"));
}

TEST(Include, PathsAreRelativeToTheIncludingFile) {
  const TemporaryFolder folder;
  folder.write("common.txtpb", std::string(kTask) + "train { steps: 5 }");
  folder.write("parts/a.txtpb", "include: \"b.txtpb\" include: \"../common.txtpb\"");
  folder.write("parts/b.txtpb", "train { steps: 4 seed: 6 }");
  const fs::path file = folder.write("run.txtpb", "include: \"parts/a.txtpb\"");
  const configs::Config config = load_config(file, {});
  EXPECT_EQ(config.train().steps(), 5);
  EXPECT_EQ(config.train().seed(), 6u);
}

TEST(Include, OneFileMayBeIncludedByTwo) {
  const TemporaryFolder folder;
  folder.write("common.txtpb", kTask);
  folder.write("a.txtpb", "include: \"common.txtpb\"");
  folder.write("b.txtpb", "include: \"common.txtpb\"");
  EXPECT_NO_THROW(
      load_config(folder.write("run.txtpb", "include: [\"a.txtpb\", \"b.txtpb\"]"), {}));
}

TEST(Include, CyclesAreNamed) {
  const TemporaryFolder folder;
  folder.write("a.txtpb", "include: \"b.txtpb\"");
  const fs::path b = folder.write("b.txtpb", "\n  include: \"run.txtpb\"");
  const fs::path file = folder.write("run.txtpb", "include: \"a.txtpb\"");
  EXPECT_EQ(config_error([&] { load_config(file, {}); }),
            b.string() +
                ":2:3: include: includes form a cycle: "
                "run.txtpb -> a.txtpb -> b.txtpb -> run.txtpb");
  folder.write("run.txtpb", "include: \"./run.txtpb\"");
  EXPECT_THAT(config_error([&] { load_config(file, {}); }),
              HasSubstr("cycle: run.txtpb -> run.txtpb"));
}

std::string chain(const TemporaryFolder& folder, int num_includes, const std::string& twice) {
  for (int i = 0; i < num_includes; ++i) {
    const std::string next = "include: \"" + std::to_string(i + 1) + ".txtpb\"\n";
    folder.write(std::to_string(i) + ".txtpb", next + (twice.empty() ? "" : next));
  }
  return folder.write(std::to_string(num_includes) + ".txtpb", kTask).string();
}

TEST(Include, DepthAndNumberAreLimited) {
  const TemporaryFolder deep;
  chain(deep, 32, "");
  EXPECT_NO_THROW(load_config(deep.path() / "0.txtpb", {}));
  const TemporaryFolder deeper;
  chain(deeper, 33, "");
  EXPECT_THAT(config_error([&] { load_config(deeper.path() / "0.txtpb", {}); }),
              HasSubstr("includes are nested deeper than 32"));
  const TemporaryFolder wide;  // 2^32 files if each include is read
  chain(wide, 32, "twice");
  EXPECT_THAT(config_error([&] { load_config(wide.path() / "0.txtpb", {}); }),
              HasSubstr("more than 256 files are included"));
}

TEST(Include, StaysBelowTheFirstFilesFolder) {
  const TemporaryFolder folder;
  folder.write("secret.txtpb", kTask);
  folder.write("inside/run_link_target.txtpb", kTask);
  const auto refused = [&](const std::string& include, const std::string& words) {
    const fs::path file = folder.write("inside/run.txtpb", "include: \"" + include + "\"");
    EXPECT_THAT(config_error([&] { load_config(file, {}); }),
                testing::AllOf(StartsWith(file.string() + ":1:1: include: "), HasSubstr(words)));
  };
  refused("../secret.txtpb", "is outside the folder of the first file");
  refused("x/../../secret.txtpb", "cannot be opened");
  fs::create_directory(folder.path() / "inside/x");
  refused("x/../../secret.txtpb", "is outside the folder");
  fs::create_symlink("../secret.txtpb", folder.path() / "inside/link.txtpb");
  refused("link.txtpb", "is outside the folder");
  fs::create_directory_symlink("..", folder.path() / "inside/up");
  refused("up/secret.txtpb", "is outside the folder");
  refused((folder.path() / "inside/run_link_target.txtpb").string(), "must be a path relative");
  refused("", "must be a path relative");
  refused("a\\036.txtpb", "'a\\x1e.txtpb' must be a path relative to this file, without control");
  refused("missing.txtpb", "cannot be opened: No such file");
  refused("x", "is a folder");
  // A folder whose name only begins in the same way is outside, too.
  folder.write("inside2/run.txtpb", kTask);
  refused("../inside2/run.txtpb", "is outside the folder");
}

TEST(File, WhatCannotBeReadIsSaidByName) {
  const TemporaryFolder folder;
  const fs::path missing = folder.path() / "missing.txtpb";
  EXPECT_EQ(config_error([&] { load_config(missing, {}); }),
            missing.string() + ": cannot be opened: No such file or directory");
  EXPECT_EQ(config_error([&] { load_config(folder.path(), {}); }),
            folder.path().string() + ": is a folder, not a .txtpb file");
  EXPECT_EQ(config_error([&] { load_config("/dev/zero", {}); }),
            "/dev/zero: is not a regular file");
  const fs::path file = folder.write("run.txtpb", kTask);
  set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
    return std::string(call) == "open" ? EACCES : 0;
  });
  try {
    load_config(file, {});
    ADD_FAILURE() << "a file that may not be read was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);  // the configuration may be valid
    EXPECT_THAT(error.what(),
                testing::AllOf(HasSubstr(file.string()), HasSubstr("Permission denied")));
  }
  set_file_fault_hook({});
  EXPECT_THAT(
      config_error([&] { load_config(folder.write("binary", std::string("\x7f\x45\0", 3)), {}); }),
      HasSubstr("binary:1:3: byte 0x00 is not UTF-8 text; is this a .txtpb file?"));
}

TEST(File, HugeFilesAreRefusedUnread) {
  const TemporaryFolder folder;
  const fs::path file = folder.write("huge.txtpb", "");
  fs::resize_file(file, std::uintmax_t{1} << 30);  // sparse
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(config_error([&] { load_config(file, {}); }), HasSubstr(file.string()));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

}  // namespace
}  // namespace birkhoff
