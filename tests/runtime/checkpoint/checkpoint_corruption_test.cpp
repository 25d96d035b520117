// Damage to checkpoints: bits, lengths, blocks, misplaced files, false manifests. Anything that
// differs from the saved state is rejected by name. BIRKHOFF_CORRUPTION=all tries every bit and
// length.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "cluster/base/error.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/checkpoint/safetensors.h"
#include "tests/cluster/base/corruption.h"
#include "tests/cluster/base/tally.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// The parts that one of two ranks holds of a state with an embedding of `rows`: parameters whole,
// moments in flat ranges of equal size.
std::vector<TensorPart> state_of(int rank, std::int64_t rows) {
  const at::Tensor embedding = at::zeros({rows, 40});
  std::vector<TensorPart> parts = {
      whole_part("embedding.weight", StateKind::kParameter, embedding.clone(), 0),
      whole_part("blocks.0.half", StateKind::kParameter, at::zeros({30, 20}, at::kBFloat16), 1),
      whole_part("blocks.0.norm.weight", StateKind::kParameter, at::zeros({5}, at::kDouble), 0),
      whole_part("centroids.count", StateKind::kStatistic, at::zeros({3}, at::kLong), 1)};
  for (const char* moment : {"adamw.m/embedding.weight", "adamw.v/embedding.weight"}) {
    TensorPart part = whole_part(moment, StateKind::kOptimizer, embedding, rank);
    part.region.flat_begin = embedding.numel() * rank / 2;
    part.region.flat_end = embedding.numel() * (rank + 1) / 2;
    part.data = at::zeros({part.region.flat_end - part.region.flat_begin});
    parts.push_back(part);
  }
  return parts;
}

class CheckpointCorruption : public testing::Test {
 protected:
  static constexpr std::int64_t kRows = 52;  // 32 KiB altogether

  CheckpointCorruption() { write_bytes(tokenizer_, std::string(1500, 't')); }

  // Saves step `step` of a run into `checkpoints`; its values are those of `values_of`.
  void save(const fs::path& checkpoints, const std::string& run, std::int64_t step,
            std::int64_t values_of, std::int64_t rows = kRows) const {
    run_ranks(2, [&](ProcessGroup& world) {
      CheckpointWriter writer(checkpoints, 2, {tokenizer_}, world);
      std::vector<TensorPart> parts = state_of(world.rank(), rows);
      fill_parts(parts, values_of);
      CheckpointHeader header = make_header(step);
      header.set_run(run);
      header.set_tokenizer_file("tokenizer.chars");
      writer.save(header, parts);
      writer.finish();
    });
  }

  // Why the checkpoint is rejected; empty if it is not.
  static std::string refusal(const fs::path& checkpoint) {
    try {
      verify_checkpoint(open_checkpoint(checkpoint));
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      return error.what();
    }
  }

  // Keys of a file's tensors by the position just past their last byte.
  static std::map<std::int64_t, std::string> tensors_of(const fs::path& file) {
    std::map<std::int64_t, std::string> keys;
    if (file.extension() != ".safetensors") return keys;
    const SafetensorsReader reader(file.string());
    const auto begin = static_cast<std::int64_t>(reader.header_bytes().size());
    keys[begin] = "";  // the header
    for (const SafetensorsEntry& entry : reader.entries()) keys[begin + entry.end] = entry.name;
    return keys;
  }

  const TestFolder folder_;
  const fs::path tokenizer_ = folder_.path() / "tokenizer.chars";
  const fs::path checkpoints_ = folder_.path() / "checkpoints";
};

TEST_F(CheckpointCorruption, EveryBitIsCovered) {
  save(checkpoints_, "mine", 1, 1);
  const fs::path checkpoint = checkpoints_ / step_name(1);
  std::uintmax_t bytes = 0;
  Tally tally("bits of a checkpoint");
  for (const std::string& name : names_in(checkpoint)) {
    const fs::path file = checkpoint / name;
    const auto tensors = tensors_of(file);
    bytes += fs::file_size(file);
    for (const std::int64_t bit :
         places_to_try(8 * static_cast<std::int64_t>(fs::file_size(file)))) {
      tally.attempt([&] {
        flip_bit(file, bit);
        const std::string what = refusal(checkpoint);
        EXPECT_THAT(what, HasSubstr(file.string())) << "bit " << bit;
        const auto tensor = tensors.upper_bound(bit / 8);
        if (tensor != tensors.end()) {
          EXPECT_THAT(what, HasSubstr(tensor->second)) << "bit " << bit;
        }
        flip_bit(file, bit);
      });
    }
  }
  EXPECT_NEAR(static_cast<double>(bytes), 32768, 2048);
  EXPECT_EQ(refusal(checkpoint), "");
}

TEST_F(CheckpointCorruption, EveryLengthIsCovered) {
  save(checkpoints_, "mine", 1, 1);
  const fs::path checkpoint = checkpoints_ / step_name(1);
  Tally tally("lengths of a checkpoint's files");
  for (const std::string& name : names_in(checkpoint)) {
    const fs::path file = checkpoint / name;
    const std::string good = read_bytes(file);
    std::vector<std::int64_t> lengths = places_to_try(static_cast<std::int64_t>(good.size()));
    std::reverse(lengths.begin(), lengths.end());
    for (const std::int64_t length : lengths) {
      tally.attempt([&] {
        fs::resize_file(file, static_cast<std::uintmax_t>(length));
        EXPECT_THAT(refusal(checkpoint), HasSubstr(file.string())) << "length " << length;
      });
    }
    for (const std::string& more : {std::string(1, '\0'), std::string("\n"), good}) {
      tally.attempt([&] {
        write_bytes(file, good + more);
        EXPECT_THAT(refusal(checkpoint), HasSubstr(file.string()));
      });
    }
    tally.attempt([&] {
      fs::remove(file);
      EXPECT_THAT(refusal(checkpoint), HasSubstr(name));
    });
    write_bytes(file, good);
  }
  EXPECT_EQ(refusal(checkpoint), "");
}

TEST_F(CheckpointCorruption, RandomDamageOfALargeOne) {
  save(checkpoints_, "mine", 1, 1, /*rows=*/4096);
  const fs::path checkpoint = checkpoints_ / step_name(1);
  std::vector<std::pair<fs::path, std::string>> files;
  std::size_t bytes = 0;
  for (const std::string& name : names_in(checkpoint)) {
    files.emplace_back(checkpoint / name, read_bytes(checkpoint / name));
    bytes += files.back().second.size();
  }
  ASSERT_GT(bytes, std::size_t{1} << 20);
  std::mt19937 random(1);
  Tally tally("random damages of a large checkpoint");
  for (int i = 0; i < num_random_damages(); ++i) {
    const auto& [file, good] = files[random() % files.size()];
    tally.attempt([&, &file = file, &good = good] {
      write_bytes(file, damaged(good, random));
      EXPECT_THAT(refusal(checkpoint), HasSubstr(file.string()));
      write_bytes(file, good);
    });
  }
  EXPECT_EQ(refusal(checkpoint), "");
}

// Every file here was written by this program and is whole, but belongs elsewhere.
TEST_F(CheckpointCorruption, FilesInOtherPlaces) {
  const fs::path others = folder_.path() / "others";
  save(checkpoints_, "mine", 1, 1);
  save(checkpoints_, "mine", 2, 2);
  save(others, "other", 2, 3);
  const fs::path newest = checkpoints_ / step_name(2);
  Tally tally("files of other ranks, steps and runs");
  const auto try_file = [&](const fs::path& file, const fs::path& other) {
    const std::string good = read_bytes(file), bad = read_bytes(other);
    if (bad == good) return;  // index and tokenizer are the same everywhere
    tally.attempt([&] {
      write_bytes(file, bad);
      // A manifest of another save is valid, but the files next to it are not those that it lists.
      EXPECT_THAT(
          refusal(newest),
          HasSubstr(file.filename() == kCheckpointManifestName ? newest.string() : file.string()))
          << other;
      testing::internal::CaptureStderr();
      const auto found = find_newest_checkpoint(checkpoints_, /*set_aside=*/false);
      EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("step-00000002"));
      ASSERT_TRUE(found);
      EXPECT_EQ(found->manifest.step(), 1);
      write_bytes(file, good);
    });
  };
  for (const std::string& name : names_in(newest)) {
    try_file(newest / name, checkpoints_ / step_name(1) / name);
    try_file(newest / name, others / step_name(2) / name);
  }
  try_file(newest / "optimizer-00001-of-00002.safetensors",
           newest / "optimizer-00002-of-00002.safetensors");
  try_file(newest / "optimizer-00002-of-00002.safetensors",
           newest / "optimizer-00001-of-00002.safetensors");
  try_file(newest / "model-00001-of-00002.safetensors",
           newest / "model-00002-of-00002.safetensors");
  EXPECT_EQ(tally.tried(), 5 + 5 + 3);
  EXPECT_EQ(refusal(newest), "");
}

// A damaged identity must never make a run pass for another or for a new one.
TEST_F(CheckpointCorruption, EveryBitOfTheRunsIdentityIsCovered) {
  const fs::path run = folder_.path() / "run", identity = run / "run.json";
  {
    RunFolder mine(run, 1, false);
    save(mine.paths().checkpoints(), mine.id(), 1, 1);
    mine.note_checkpoint();
  }
  Tally tally("bits and lengths of run.json");
  const std::string good = read_bytes(identity);
  const auto expect_refused = [&](const std::string& bad) {
    tally.attempt([&] {
      write_bytes(identity, bad);
      try {
        RunFolder(run, 1, false).find_resume_point();
        ADD_FAILURE() << bad;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kCheckpoint) << error.what();
        EXPECT_THAT(error.what(),
                    testing::AnyOf(HasSubstr("run.json"), HasSubstr("this folder is run")));
      }
    });
  };
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    expect_refused(bad);
  }
  // Without its line end the file is still complete.
  for (std::size_t length = 0; length + 1 < good.size(); ++length) {
    expect_refused(good.substr(0, length));
  }
}

// Malicious manifests that pass their checksum.
TEST_F(CheckpointCorruption, ManifestsThatLieAreRefused) {
  save(checkpoints_, "mine", 1, 1);
  const fs::path checkpoint = checkpoints_ / step_name(1);
  using Manifest = configs::CheckpointManifest;
  const std::vector<std::function<void(Manifest&)>> lies = {
      [](Manifest& m) { m.set_format("else"); },
      [](Manifest& m) { m.set_ranks(0); },
      [](Manifest& m) { m.set_step(-1); },
      [](Manifest& m) { m.set_consumed(-1); },
      [](Manifest& m) { m.set_tokens(INT64_MIN); },
      [](Manifest& m) { m.set_metrics_bytes(-1); },
      [](Manifest& m) { m.mutable_file(0)->set_name("../../etc/passwd"); },
      [](Manifest& m) { m.mutable_file(0)->set_name(".."); },
      [](Manifest& m) { m.mutable_file(0)->set_name(""); },
      [](Manifest& m) { m.mutable_file(0)->set_name("/etc/passwd"); },
      [](Manifest& m) { m.mutable_file(0)->set_name(kCheckpointManifestName); },
      [](Manifest& m) { m.mutable_file(0)->set_bytes(-1); },
      [](Manifest& m) { m.mutable_file(0)->set_bytes(INT64_MAX); },
      [](Manifest& m) { m.mutable_file(0)->set_hash("0"); },
      [](Manifest& m) { m.mutable_file(0)->mutable_hash()->at(0) ^= 1; },
      [](Manifest& m) { *m.add_file() = m.file(0); },
      [](Manifest& m) { *m.add_tensor() = m.tensor(0); },
      [](Manifest& m) { m.mutable_tensor(0)->set_name(""); },
      [](Manifest& m) { m.mutable_tensor(0)->set_kind("thing"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_dtype("F8"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_dtype("I64"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_file("other"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_key("other"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_global_shape(0, 1000000); },
      [](Manifest& m) { m.mutable_tensor(0)->set_global_shape(0, INT64_MAX); },
      [](Manifest& m) { m.mutable_tensor(0)->set_global_shape(0, -4); },
      [](Manifest& m) { m.mutable_tensor(0)->add_global_shape(INT64_MAX); },
      [](Manifest& m) { m.mutable_tensor(0)->set_box_offset(0, 1); },
      [](Manifest& m) { m.mutable_tensor(0)->clear_box_size(); },
      [](Manifest& m) { m.mutable_tensor(0)->set_flat_end(1); },
      [](Manifest& m) { m.mutable_tensor(0)->set_flat_end(INT64_MAX); },
      [](Manifest& m) { m.mutable_tensor(0)->set_flat_begin(-1); },
      [](Manifest& m) { m.mutable_tensor(0)->set_crc32c(m.tensor(0).crc32c() ^ 1); },
      [](Manifest& m) { m.mutable_tensor(0)->set_block_crc32c(0, m.tensor(0).crc32c() ^ 1); },
      [](Manifest& m) { m.mutable_tensor(0)->add_block_crc32c(1); },
      [](Manifest& m) { m.mutable_tensor(0)->clear_block_crc32c(); },
      [](Manifest& m) { m.clear_block_bytes(); },
      [](Manifest& m) { m.set_block_bytes(4); },
      [](Manifest& m) { m.set_block_bytes(-8); },
      [](Manifest& m) { m.set_block_bytes(INT64_MAX - 7); },
      [](Manifest& m) { m.mutable_tensor()->RemoveLast(); },
  };
  const std::string path = (checkpoint / kCheckpointManifestName).string();
  const std::string good = read_bytes(path);
  for (std::size_t i = 0; i < lies.size(); ++i) {
    Manifest manifest = parse_checkpoint_manifest(good, path);
    lies[i](manifest);
    write_bytes(path, manifest_text(manifest));
    EXPECT_THAT(refusal(checkpoint), HasSubstr(checkpoint.string())) << "lie " << i;
  }
}

}  // namespace
}  // namespace birkhoff
