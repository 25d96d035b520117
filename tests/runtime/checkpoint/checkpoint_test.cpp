// Saving, finding and loading checkpoints: round trips between all layouts, retention, damage, and
// rejections by name.
#include "runtime/checkpoint/checkpoint.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "cluster/base/error.h"
#include "cluster/base/files/lease.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/layout.h"
#include "runtime/checkpoint/manifest.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

// Expects Error(code) whose text holds all of `parts`.
void expect_error(ExitCode code, const std::vector<std::string>& parts,
                  const std::function<void()>& action) {
  try {
    action();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& part : parts) {
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

TEST(Checkpoint, EveryLayoutLoadsOnEveryOther) {
  for (const int saved_ranks : {1, 2, 3, 4, 6}) {
    for (const Layout saved : kLayouts) {
      const TestFolder folder;
      save_step(folder, 7, saved_ranks, saved);
      const auto checkpoint = find_newest_checkpoint(folder, true);
      ASSERT_TRUE(checkpoint);
      EXPECT_EQ(checkpoint->manifest.ranks(), saved_ranks);
      for (const int ranks : {1, 2, 3, 4, 6}) {
        for (const Layout layout : kLayouts) {
          SCOPED_TRACE(testing::Message()
                       << saved_ranks << " ranks, layout " << static_cast<int>(saved) << " to "
                       << ranks << ", " << static_cast<int>(layout));
          expect_holds_step(*checkpoint, 7, ranks, layout);
        }
      }
    }
  }
}

// Losses of another split or number of sequences do not compare: the best of each stays.
TEST(Checkpoint, TheBestOfEachEvaluationIsKept) {
  struct Saved {
    std::int64_t step;
    std::string split;
    std::int64_t sequences;
    double loss;
  };
  const std::vector<Saved> saved = {
      {1, "test", 0, 3.5},  {2, "test", 0, 3.4},  {3, "valid", 0, 4.3}, {4, "valid", 0, 4.1},
      {5, "valid", 0, 4.1}, {6, "valid", 3, 5.0}, {7, "valid", 3, 6.0}, {8, "valid", 3, 7.0}};
  const TestFolder folder;
  run_ranks(1, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, {/*newest_count=*/1, /*best_too=*/true}, {}, world);
    for (const Saved& each : saved) {
      CheckpointHeader header = make_header(each.step);
      auto& evaluate = *header.mutable_config()->mutable_evaluate();
      evaluate.set_split(each.split);
      evaluate.set_sequences(each.sequences);
      header.set_held_out_loss(each.loss);
      writer.save(header, make_parts(0, 1, Layout::kReplicated));
      writer.finish();
    }
  });
  std::vector<std::int64_t> steps;
  for (const auto& [step, path] : list_checkpoints(folder)) steps.push_back(step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{2, 4, 6, 8}));
}

TEST(Checkpoint, HeaderComesBackAsItWas) {
  const TestFolder folder;
  CheckpointHeader header = make_header(3);
  header.set_corpus("fingerprint");
  header.set_tokenizer("bytes");
  header.set_vocabulary(259);
  header.mutable_config()->mutable_train()->set_clip_norm(0.1f);
  header.mutable_config()->mutable_model()->set_norm_epsilon(1e-5f);
  header.mutable_config()->mutable_data()->set_corpus("a \"quoted\" \xc3\xa9 name");
  run_ranks(1, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, 2, {}, world);
    writer.save(header, make_parts(0, 1, Layout::kReplicated));
    writer.finish();
  });
  configs::CheckpointManifest manifest = find_newest_checkpoint(folder, false)->manifest;
  manifest.clear_file();
  manifest.clear_tensor();
  manifest.clear_checksum();
  header.set_format(kCheckpointFormat);
  header.set_version(kCheckpointVersion);
  header.set_block_bytes(kCrcBlockBytes);
  header.set_ranks(1);
  EXPECT_EQ(manifest.SerializeAsString(), header.SerializeAsString());
}

TEST(Checkpoint, FilesAreNamedAsPythonExpects) {
  const TestFolder folder;
  save_step(folder, 12, 2, Layout::kFlatRanges);  // rank 0 owns all parameters
  EXPECT_THAT(names_in(folder.path() / "step-00000012"),
              ElementsAre("manifest.json", "model-00001-of-00001.safetensors",
                          "model.safetensors.index.json", "optimizer-00001-of-00002.safetensors",
                          "optimizer-00002-of-00002.safetensors"));
  const TestFolder balanced;
  save_step(balanced, 12, 2, Layout::kReplicated);
  EXPECT_THAT(
      names_in(balanced.path() / "step-00000012"),
      ElementsAre("manifest.json", "model-00001-of-00002.safetensors",
                  "model-00002-of-00002.safetensors", "model.safetensors.index.json",
                  "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"));
}

TEST(Checkpoint, ExtraFilesAreCopiedAndVerified) {
  const TestFolder folder, other;
  write_bytes(other.path() / "tokenizer.model", "words");
  run_ranks(1, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, 2, {other.path() / "tokenizer.model"}, world);
    writer.save(make_header(1), make_parts(0, 1, Layout::kReplicated));
    writer.finish();
  });
  const fs::path copy = folder.path() / "step-00000001" / "tokenizer.model";
  EXPECT_EQ(read_bytes(copy), "words");
  write_bytes(copy, "wordS");
  expect_error(ExitCode::kCheckpoint, {"tokenizer.model", "hash"},
               [&] { verify_checkpoint(open_checkpoint(folder.path() / "step-00000001")); });
}

TEST(Checkpoint, PollCommitsWithoutBlockingAndReportsOnce) {
  const TestFolder folder;
  run_ranks(3, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, 2, {}, world);
    const std::int64_t before = world.ring().total_operations();
    EXPECT_FALSE(writer.poll());
    EXPECT_EQ(world.ring().total_operations(), before);  // nothing runs: no communication
    std::vector<TensorPart> parts = make_parts(world.rank(), 3, Layout::kFlatRanges);
    fill_parts(parts, 5);
    writer.save(make_header(5), parts);
    int reported = 0;
    // Every rank sees the commit in the same call, so all leave the loop together.
    while (reported == 0) {
      const auto committed = writer.poll();
      reported += committed.has_value();
    }
    EXPECT_FALSE(writer.poll());
  });
  expect_holds_step(*find_newest_checkpoint(folder, true), 5);
}

TEST(Checkpoint, SaveFinishesTheOneBefore) {
  const TestFolder folder;
  run_ranks(2, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, 5, {}, world);
    std::vector<TensorPart> parts = make_parts(world.rank(), 2, Layout::kColumns);
    for (std::int64_t step = 1; step <= 3; ++step) {
      fill_parts(parts, step);
      writer.save(make_header(step), parts);
    }
    writer.finish();
  });
  for (std::int64_t step = 1; step <= 3; ++step) {
    expect_holds_step(open_checkpoint(folder.path() / ("step-0000000" + std::to_string(step))),
                      step);
  }
}

TEST(Checkpoint, KeepsTheNewest) {
  const TestFolder folder;
  for (const std::int64_t step : {1, 2, 3, 4}) {
    save_step(folder, step, 2, Layout::kReplicated, 2);
  }
  EXPECT_THAT(names_in(folder), ElementsAre("step-00000003", "step-00000004"));
}

TEST(Checkpoint, SavingAStepAgainReplacesIt) {
  const TestFolder folder;
  save_step(folder, 4, 1);
  save_step(folder, 4, 2, Layout::kFlatRanges);
  EXPECT_THAT(names_in(folder), ElementsAre("step-00000004"));
  const auto checkpoint = find_newest_checkpoint(folder, true);
  EXPECT_EQ(checkpoint->manifest.ranks(), 2);
  expect_holds_step(*checkpoint, 4);
}

TEST(Checkpoint, ACrashWhileReplacingKeepsTheOld) {
  const TestFolder folder;
  save_step(folder, 4);
  fs::rename(folder.path() / "step-00000004", folder.path() / ".replaced-step-00000004");
  expect_holds_step(*find_newest_checkpoint(folder, false), 4);
  EXPECT_THAT(names_in(folder), ElementsAre(".replaced-step-00000004"));
  expect_holds_step(*find_newest_checkpoint(folder, true), 4);
  EXPECT_THAT(names_in(folder), ElementsAre("step-00000004"));
}

TEST(Checkpoint, LeftoversAreRemovedAtTheStart) {
  const TestFolder folder;
  save_step(folder, 1);
  fs::create_directories(folder.path() / ".tmp-step-00000002");
  write_bytes(folder.path() / ".tmp-step-00000002" / "model-00001-of-00001.safetensors", "half");
  fs::create_directories(folder.path() / "mine");  // a user's folder is not ours
  EXPECT_EQ(find_newest_checkpoint(folder, true)->manifest.step(), 1);
  run_ranks(1, [&](ProcessGroup& world) { CheckpointWriter writer(folder, 2, {}, world); });
  EXPECT_THAT(names_in(folder), ElementsAre("mine", "step-00000001"));
}

// Just before the old holder of a run renames its save, a new one takes the run and saves the same
// step: the old one's commit fails, and the new one's files are whole.
TEST(Checkpoint, ALostRunsSaveDoesNotTouchThatOfTheNewHolder) {
  const TestFolder folder;
  const auto header_of = [](std::int64_t holder) {
    CheckpointHeader header = make_header(4);
    header.set_holder(holder);
    return header;
  };
  run_ranks(1, [&](ProcessGroup& world) {
    std::vector<TensorPart> parts = make_parts(0, 1, Layout::kReplicated);
    fill_parts(parts, 4);
    std::unique_ptr<CheckpointWriter> new_writer;
    CheckpointWriter old_writer(folder, 2, {}, world, [&] {
      if (new_writer != nullptr) throw FolderLost("lost");
      new_writer = std::make_unique<CheckpointWriter>(folder, 2, std::vector<fs::path>(), world);
      new_writer->save(header_of(2), parts);
    });
    old_writer.save(header_of(1), parts);
    EXPECT_THROW(old_writer.finish(), FolderLost);
    ASSERT_NE(new_writer, nullptr);
    new_writer->finish();
  });
  const auto checkpoint = find_newest_checkpoint(folder, true);
  EXPECT_EQ(checkpoint->manifest.holder(), 2);
  expect_holds_step(*checkpoint, 4);
}

TEST(Checkpoint, DestructorAbandonsAnUnfinishedSave) {
  const TestFolder folder;
  save_step(folder, 1);
  run_ranks(2, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, 2, {}, world);
    writer.save(make_header(2), make_parts(world.rank(), 2, Layout::kReplicated));
  });
  expect_holds_step(*find_newest_checkpoint(folder, true), 1);
}

TEST(Checkpoint, NothingThereIsNoError) {
  const TestFolder folder;
  EXPECT_FALSE(find_newest_checkpoint(folder.path() / "missing", true));
  EXPECT_FALSE(find_newest_checkpoint(folder, true));
  fs::create_directories(folder.path() / ".tmp-step-00000001");
  EXPECT_FALSE(find_newest_checkpoint(folder, true));
}

TEST(Checkpoint, DamagedOneIsSetAsideAndTheOneBeforeUsed) {
  const TestFolder folder;
  save_step(folder, 1);
  for (int round = 0; round < 2; ++round) {  // the second finds damaged-step-2 taken
    save_step(folder, 2);
    const fs::path file = folder.path() / "step-00000002" / "optimizer-00001-of-00001.safetensors";
    std::string bytes = read_bytes(file);
    bytes[bytes.size() - 1] = static_cast<char>(bytes.back() ^ 1);
    write_bytes(file, bytes);
    if (round == 0) {  // a reader that may not change anything still finds the good one
      expect_holds_step(*find_newest_checkpoint(folder, false), 1);
    }
    testing::internal::CaptureStderr();
    expect_holds_step(*find_newest_checkpoint(folder, true), 1);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, HasSubstr("step-00000002/optimizer-00001-of-00001.safetensors"));
    EXPECT_THAT(log, HasSubstr(round == 0 ? "damaged-step-00000002," : "damaged-step-00000002-2,"));
  }
  EXPECT_THAT(names_in(folder),
              ElementsAre("damaged-step-00000002", "damaged-step-00000002-2", "step-00000001"));
}

TEST(Checkpoint, AllDamagedIsAnErrorNowAndLater) {
  const TestFolder folder;
  save_step(folder, 1);
  save_step(folder, 2);
  fs::remove(folder.path() / "step-00000001" / kCheckpointManifestName);
  write_bytes(folder.path() / "step-00000002" / kCheckpointManifestName, "{}");
  for (int i = 0; i < 2; ++i) {
    expect_error(ExitCode::kCheckpoint, {folder.path().string(), "no valid checkpoint", "--fresh"},
                 [&] { find_newest_checkpoint(folder, true); });
    EXPECT_THAT(names_in(folder), ElementsAre("damaged-step-00000001", "damaged-step-00000002"));
  }
}

TEST(Checkpoint, AnotherVersionIsRefusedAndNotSetAside) {
  const TestFolder folder;
  save_step(folder, 1);
  const fs::path path = folder.path() / "step-00000001" / kCheckpointManifestName;
  configs::CheckpointManifest manifest = parse_checkpoint_manifest(read_bytes(path), "");
  manifest.set_version(kCheckpointVersion + 1);
  write_bytes(path, manifest_text(manifest));
  expect_error(ExitCode::kCheckpoint, {"version 3", "versions 1 to 2", "manifest.json"},
               [&] { find_newest_checkpoint(folder, true); });
  EXPECT_THAT(names_in(folder), ElementsAre("step-00000001"));
}

TEST(Checkpoint, TheVersionBeforeBlocksIsRead) {
  const TestFolder folder;
  save_step(folder, 1);
  const fs::path path = folder.path() / "step-00000001" / kCheckpointManifestName;
  configs::CheckpointManifest manifest = parse_checkpoint_manifest(read_bytes(path), "");
  manifest.set_version(1);
  manifest.clear_block_bytes();
  for (auto& tensor : *manifest.mutable_tensor()) tensor.clear_block_crc32c();
  write_bytes(path, manifest_text(manifest));
  expect_holds_step(*find_newest_checkpoint(folder, true), 1);
}

TEST(Checkpoint, FoldersWithTheWrongStepAreNotUsed) {
  const TestFolder folder;
  save_step(folder, 1);
  fs::copy(folder.path() / "step-00000001", folder.path() / "step-00000009");
  expect_holds_step(*find_newest_checkpoint(folder, false), 1);
}

TEST(Checkpoint, MisfitsAreRefusedByName) {
  const TestFolder folder;
  save_step(folder, 1);
  const CheckpointFolder checkpoint = *find_newest_checkpoint(folder, false);
  const auto load = [&](const std::function<void(std::vector<TensorPart>&)>& change,
                        void (*loader)(const CheckpointFolder&, std::vector<TensorPart>&)) {
    std::vector<TensorPart> parts = make_parts(0, 1, Layout::kReplicated);
    change(parts);
    loader(checkpoint, parts);
  };
  expect_error(ExitCode::kCheckpoint, {"'head.weight' is missing"}, [&] {
    load(
        [](auto& parts) {
          parts.push_back(whole_part("head.weight", StateKind::kParameter, at::zeros({2}), 0));
        },
        load_checkpoint);
  });
  const auto drop_last = [](auto& parts) { parts.pop_back(); };
  expect_error(ExitCode::kCheckpoint, {"'centroids.count' is in the checkpoint but not"},
               [&] { load(drop_last, load_checkpoint); });
  load(drop_last, load_model_tensors);
  expect_error(ExitCode::kCheckpoint, {"'embedding.weight'", "[7, 6]", "[6, 7]"}, [&] {
    load(
        [](auto& parts) {
          parts[0] = whole_part("embedding.weight", StateKind::kParameter, at::zeros({6, 7}), 0);
        },
        load_checkpoint);
  });
  expect_error(ExitCode::kCheckpoint, {"'embedding.weight'", "F32", "F64"}, [&] {
    load(
        [](auto& parts) {
          parts[0] = whole_part("embedding.weight", StateKind::kParameter,
                                at::zeros({7, 6}, at::kDouble), 0);
        },
        load_model_tensors);
  });
  expect_error(ExitCode::kCheckpoint, {"'embedding.weight'", "parameter", "optimizer"}, [&] {
    load([](auto& parts) { parts[0].kind = StateKind::kOptimizer; }, load_checkpoint);
  });
}

TEST(Checkpoint, LoadingChecksEveryTensorItReads) {
  const TestFolder folder;
  save_step(folder, 1);
  const CheckpointFolder checkpoint = open_checkpoint(folder.path() / "step-00000001");
  const fs::path file = checkpoint.path / "model-00001-of-00001.safetensors";
  std::string bytes = read_bytes(file);
  bytes[bytes.size() - 1] = static_cast<char>(bytes.back() ^ 0x40);
  write_bytes(file, bytes);
  std::vector<TensorPart> parts = make_parts(0, 1, Layout::kReplicated);
  expect_error(ExitCode::kCheckpoint, {file.string(), "CRC32C"},
               [&] { load_checkpoint(checkpoint, parts); });
}

TEST(Checkpoint, StatesThatCannotBeLoadedAreNotCommitted) {
  // A hole (no rank owns the second half) and an overlap (two ranks own all of it) are defects of
  // the caller.
  const TestFolder folder;
  save_step(folder, 1);
  for (const bool hole : {true, false}) {
    expect_error(
        ExitCode::kInternal, {"adamw.m/x", hole ? "hold 2 of 4" : "overlap", "rank 0"}, [&] {
          run_ranks(2, [&](ProcessGroup& world) {
            CheckpointWriter writer(folder, 2, {}, world);
            TensorPart part =
                whole_part("adamw.m/x", StateKind::kOptimizer, at::zeros({4}), world.rank());
            if (hole && world.rank() == 0) {
              part.region.flat_end = 2;
              part.data = part.data.narrow(0, 0, 2);
            } else if (hole) {
              part.region.flat_end = 0;
              part.data = part.data.narrow(0, 0, 0);
            }
            writer.save(make_header(2), {part});
            writer.finish();
          });
        });
  }
  EXPECT_THAT(names_in(folder), ElementsAre("step-00000001"));
}

TEST(Checkpoint, DescriptionNamesWhatMatters) {
  const TestFolder folder;
  save_step(folder, 42, 2, Layout::kFlatRanges);
  const std::string text = describe_checkpoint(open_checkpoint(folder.path() / "step-00000042"));
  for (const char* part :
       {"step         42 (336 sequences, 2688 tokens)", "on 2 ranks\n", "embedding.weight",
        "[7, 6]", "optimizer-00002-of-00002.safetensors", "60 parameters"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

}  // namespace
}  // namespace birkhoff
