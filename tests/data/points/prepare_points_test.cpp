// prepare of point sets: files, lists, classes, splits, damage, stops.
#include "data/prepare/points/prepare_points.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "data/corpus/corpus.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/data/helpers.h"
#include "tests/data/points/point_files.h"
#include "tests/data/prepare_helpers.h"

namespace birkhoff {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

using Labels = std::vector<std::int64_t>;
using Values = std::vector<float>;

// All options of a command, and the command.
struct PointCommand : PrepareOptions {
  PointOptions points;
};

PointCommand point_options(const std::string& out, std::vector<std::string> paths) {
  PointCommand options{prepare_options(out, std::move(paths)), {}};
  options.valid_fraction = 0;
  return options;
}

PrepareResult prepare(const PointCommand& options,
                      const std::function<void(const PrepareProgress&)>& progress = {},
                      ProcessGroup* ranks = nullptr) {
  return prepare_points(options, options.points, progress, ranks);
}

// The coordinates of all sets of a split, one after another.
Values values_in(const std::string& folder, const std::string& split) {
  const Corpus corpus(folder);
  const auto& record = corpus.record(split, "points");
  ShardSequence shards(corpus, record);
  Values values(static_cast<std::size_t>(shards.elements() * record.shape(0) * record.shape(1)));
  shards.read_bytes(0, shards.elements(), reinterpret_cast<char*>(values.data()));
  return values;
}

Labels labels_in(const std::string& folder, const std::string& split) {
  return labels_of(Corpus(folder), split);
}

std::string seed(const std::string& name) {
  return std::string(BIRKHOFF_SOURCE_DIR) + "/tests/fuzz/seeds/modelnet/" + name;
}

// The sets of two files, in the order of lists, with the names of their classes.
TEST(PreparePoints, ListsAreSplitsAndNamesAreClasses) {
  TemporaryFolder folder;
  const Values a = point_values(3, 4, 3, 1), b = point_values(2, 4, 3, 5),
               c = point_values(1, 4, 3);
  write_text(folder / "in/train0.h5", modelnet_of(a, 4, 3, {2, 0, 2}));
  write_text(folder / "in/train1.h5", modelnet_of(b, 4, 3, {0, 2}));
  write_text(folder / "in/test0.h5", modelnet_of(c, 4, 3, {1}));
  write_text(folder / "in/shape_names.txt", "bed\nchair\nsofa\ntable\n");
  write_text(folder / "in/train_files.txt", "data/old/train1.h5\ndata/old/train0.h5\n");
  write_text(folder / "in/test_files.txt", "data/old/test0.h5");
  PointCommand options = point_options(folder / "corpus", {folder / "in/train_files.txt"});
  options.test_paths = {folder / "in/test_files.txt"};
  EXPECT_THAT(prepare(options).notes, testing::IsEmpty());
  verify_corpus(Corpus(folder / "corpus"));
  Values train = b;
  train.insert(train.end(), a.begin(), a.end());
  EXPECT_EQ(values_in(options.out, "train"), train);
  EXPECT_EQ(values_in(options.out, "test"), c);
  EXPECT_EQ(labels_in(options.out, "train"), (Labels{0, 2, 2, 0, 2}));
  EXPECT_EQ(labels_in(options.out, "test"), (Labels{1}));
  // No set is a table.
  EXPECT_EQ(classes_of(options.out), (std::vector<std::string>{"bed", "chair", "sofa", "table"}));
  EXPECT_THAT(Corpus(options.out).record("train", "points").shape(), ElementsAre(4, 3));
  EXPECT_TRUE(prepare(options).already_prepared);
  // Other names are another input.
  write_text(folder / "in/shape_names.txt", "bed\nchair\nsofa\nvase\n");
  expect_error(ExitCode::kUsage, [&] { prepare(options); }, {"other point sets"});

  // In the order of another corpus.
  PointCommand like = point_options(folder / "like", {folder / "in/train0.h5"});
  like.class_names = {"sofa", "x", "bed"};
  prepare(like);
  EXPECT_EQ(labels_in(like.out, "train"), (Labels{0, 2, 0}));

  // Too few names matter only to labels.
  write_text(folder / "in/shape_names.txt", "bed\nchair\n");
  PointCommand few = point_options(folder / "few", {folder / "in/train0.h5"});
  expect_error(ExitCode::kData, [&] { prepare(few); }, {"a set has the label 2"});
  few.points.labels = false;
  prepare(few);
  EXPECT_EQ(Corpus(few.out).split("train").record_size(), 1);
}

TEST(PreparePoints, AFolderIsWalkedAndLabelsAreNumbers) {
  TemporaryFolder folder;
  const Values a = point_values(30, 5, 2), b = point_values(20, 5, 2, 9);
  std::vector<std::uint8_t> of_a(30, 11), of_b(20, 3);
  write_text(folder / "in/x/a.H5", modelnet_of(a, 5, 2, of_a));
  write_text(folder / "in/ply_data_test0.h5", modelnet_of(b, 5, 2, of_b));
  write_text(folder / "in/id2file.json", "{}");
  PointCommand options = point_options(folder / "corpus", {folder / "in"});
  options.valid_fraction = 0.3;
  EXPECT_THAT(
      prepare(options).notes,
      ElementsAre(HasSubstr("warning: " + (folder / "in/ply_data_test0.h5") + " is used for"),
                  "left out " + (folder / "in/id2file.json") +
                      ", whose name is not that of a file of point sets"));
  EXPECT_EQ(classes_of(options.out), (std::vector<std::string>{"3", "11"}));
  const Labels train = labels_in(options.out, "train"), valid = labels_in(options.out, "valid");
  EXPECT_EQ(train.size() + valid.size(), 50u);
  EXPECT_NEAR(static_cast<double>(valid.size()), 15, 1);
  EXPECT_EQ(std::count(train.begin(), train.end(), 1) + std::count(valid.begin(), valid.end(), 1),
            30);
  PointCommand unlabeled = point_options(folder / "unlabeled", {folder / "in/x"});
  unlabeled.points.labels = false;
  prepare(unlabeled);
  EXPECT_EQ(Corpus(unlabeled.out).split("train").record_size(), 1);
  EXPECT_EQ(values_in(unlabeled.out, "train"), a);
}

// As h5py writes them: chunks, gzip, shuffled bytes and checksums, labels of one dimension.
TEST(PreparePoints, ReadsFilesOfH5py) {
  TemporaryFolder folder;
  Values expected = point_values(5, 6, 3, 5);
  for (const char* name : {"gzip.h5", "contiguous.h5", "chunks_shuffle.h5", "latest.h5",
                           "labels_of_one_dimension.h5"}) {
    const PointCommand options = point_options(folder / name, {seed(name)});
    prepare(options);
    EXPECT_EQ(values_in(options.out, "train"), expected) << name;
    EXPECT_EQ(classes_of(options.out), (std::vector<std::string>{"0", "3", "7", "39"})) << name;
    EXPECT_EQ(labels_in(options.out, "train"), (Labels{1, 0, 3, 2, 1})) << name;
  }
}

TEST(PreparePoints, DamagedFilesEndItOrAreCounted) {
  TemporaryFolder folder;
  const Values good = point_values(4, 6, 3);
  write_text(folder / "in/a.h5", modelnet_of(good, 6, 3, {1, 2, 1, 2}));
  write_text(folder / "in/b.h5", read_text(seed("nan.h5")));
  write_text(folder / "in/c.h5", read_text(seed("unwritten.h5")));
  PointCommand options = point_options(folder / "corpus", {folder / "in"});
  expect_error(ExitCode::kData, [&] { prepare(options); },
               {"in/b.h5: coordinate 0 of point 2 of set 1 is nan", "--skip-damaged"});
  options.points.skip_damaged = true;
  const PrepareResult result = prepare(options);
  EXPECT_THAT(result.notes, Contains(HasSubstr("skipped " + (folder / "in/b.h5: coordinate 0"))));
  EXPECT_THAT(result.notes, Contains(HasSubstr("in/c.h5: its data set 'data' has values that were "
                                               "never written")));
  EXPECT_EQ(values_in(options.out, "train"), good);
  EXPECT_EQ(labels_in(options.out, "train"), (Labels{0, 1, 0, 1}));
}

// 400 sets of three classes, in shards of one.
PointCommand many_shards(const TemporaryFolder& folder, const std::string& out) {
  std::vector<std::uint8_t> labels(400);
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<std::uint8_t>(i % 3);
  if (!path_exists(folder / "a.h5"))
    write_text(folder / "a.h5", modelnet_of(point_values(400, 8, 3), 8, 3, labels));
  PointCommand options = point_options(folder / out, {folder / "a.h5"});
  options.valid_fraction = 0.2;
  options.points.shard_bytes = 1;
  return options;
}

TEST(PreparePoints, AKilledCommandContinuesWithTheSameBytes) {
  TemporaryFolder folder;
  PointCommand options = many_shards(folder, "expected");
  prepare(options);
  const auto expected = content_of(options.out);
  int killed = 0;
  for (const int shard : {0, 40, 120}) {
    options.out = folder / fmt::format("corpus{}", shard);
    const std::string note = options.out + fmt::format("/.finished-train-{:05}", shard),
                      file = options.out + "/train-points-00000.h5";
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      prepare(options);
      _exit(0);
    }
    while (!path_exists(note) && !path_exists(options.out + "/manifest.json"))
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    killed += WIFSIGNALED(status);
    struct stat before, after;
    ASSERT_EQ(stat(file.c_str(), &before), 0);
    prepare(options);
    EXPECT_EQ(content_of(options.out), expected) << shard;
    ASSERT_EQ(stat(file.c_str(), &after), 0);
    EXPECT_EQ(before.st_ino, after.st_ino) << "the finished shard is kept";
  }
  EXPECT_GT(killed, 0);
}

}  // namespace
}  // namespace birkhoff
