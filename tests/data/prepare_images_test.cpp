// prepare of images: folders and files of many images, splits, damage, kills.
#include "data/prepare/images/prepare_images.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <thread>

#include "data/corpus/corpus.h"
#include "data/corpus/record_shards.h"
#include "data/corpus/shard_reader.h"
#include "data/corpus/verify.h"
#include "data/images/image_array.h"
#include "data/images/resize.h"
#include "tests/data/helpers.h"
#include "tests/data/images/image_files.h"
#include "tests/data/prepare_helpers.h"
#include "tests/data/text/packed_bytes.h"
#include "tests/sample_data.h"

namespace birkhoff {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

using Bytes = std::vector<std::uint8_t>;
using Labels = std::vector<std::int64_t>;

// All options of a command, and the command.
struct ImageCommand : PrepareOptions {
  ImageOptions images;
};

ImageCommand image_options(const std::string& out, std::vector<std::string> paths) {
  ImageCommand options{prepare_options(out, std::move(paths)), {}};
  options.valid_fraction = 0;
  return options;
}

PrepareResult prepare(const ImageCommand& options,
                      const std::function<void(const PrepareProgress&)>& progress = {}) {
  return prepare_images(options, options.images, progress);
}

// The pixels of each image.
std::vector<Bytes> images_of(const std::string& folder, const std::string& split) {
  const Corpus corpus(folder);
  const auto& record = corpus.record(split, "image");
  std::size_t row_bytes = 1;
  for (const std::int64_t side : record.shape()) row_bytes *= static_cast<std::size_t>(side);
  ShardSequence shards(corpus, record);
  std::vector<Bytes> images;
  for (std::int64_t i = 0; i < shards.elements(); ++i) {
    images.emplace_back(row_bytes);
    shards.read_bytes(i, 1, reinterpret_cast<char*>(images.back().data()));
  }
  return images;
}

Labels image_labels(const std::string& folder, const std::string& split) {
  return labels_of(Corpus(folder), split);
}

TEST(PrepareImages, AFolderIsAClass) {
  TemporaryFolder folder;
  write_text(folder / "in/dog/b.png", png_of(pattern(4, 5, 3, 1)));
  write_text(folder / "in/dog/a.PNG", png_of(pattern(4, 5, 3, 2)));
  write_text(folder / "in/cat/x.jpg", png_of(pattern(4, 5, 3, 3)));  // a PNG, whatever its name
  write_text(folder / "in/cat/readme.txt", "pets");
  write_text(folder / "in/dog/readme.txt", "pets");
  const ImageCommand options = image_options(folder / "corpus", {folder / "in"});
  const PrepareResult result = prepare(options);
  EXPECT_THAT(result.notes, ElementsAre("left out " + (folder / "in/cat/readme.txt") +
                                        " and 1 more file, whose names are not those of images"));
  const Corpus corpus(folder / "corpus");
  verify_corpus(corpus);
  EXPECT_EQ(classes_of(folder / "corpus"), (std::vector<std::string>{"cat", "dog"}));
  EXPECT_EQ(image_labels(folder / "corpus", "train"), (Labels{0, 1, 1}));
  EXPECT_EQ(images_of(folder / "corpus", "train"),
            (std::vector<Bytes>{pattern(4, 5, 3, 3).pixels, pattern(4, 5, 3, 2).pixels,
                                pattern(4, 5, 3, 1).pixels}));
  const auto& record = corpus.record("train", "image");
  EXPECT_THAT(record.shape(), ElementsAre(4, 5, 3));
  EXPECT_FALSE(record.has_resized());
  EXPECT_FALSE(corpus.has_tokenizer());
  EXPECT_THAT(list_directory(folder / "corpus"),
              ElementsAre("manifest.json", "train-image-00000.h5", "train-label-00000.h5"));
  EXPECT_TRUE(prepare(options).already_prepared);
  ImageCommand other = options;
  other.images.labels = false;
  expect_error(ExitCode::kUsage, [&] { prepare(other); }, {"other options"});
  other.out = folder / "unlabeled";
  prepare(other);
  EXPECT_EQ(Corpus(other.out).split("train").record_size(), 1);
  write_text(folder / "in/cat/y.png", png_of(pattern(4, 5, 3, 4)));
  expect_error(ExitCode::kUsage, [&] { prepare(options); }, {"other images"});
}

TEST(PrepareImages, SplitsHaveTheirOwnPathsOrFractions) {
  TemporaryFolder folder;
  std::set<Bytes> all;
  for (int i = 0; i < 200; ++i) {
    const Image image = pattern(3, 3, 1, i);
    all.insert(image.pixels);
    write_text(folder / fmt::format("in/{}/{:03}.png", i % 2, i), png_of(image));
  }
  ImageCommand options = image_options(folder / "fractions", {folder / "in"});
  options.valid_fraction = 0.2;
  options.test_fraction = 0.1;
  options.images.shard_bytes = 9 * 16;
  prepare(options);
  verify_corpus(Corpus(options.out));
  std::set<Bytes> found;
  const std::map<std::string, double> shares = {{"train", 140}, {"valid", 40}, {"test", 20}};
  for (const auto& [split, share] : shares) {
    const auto images = images_of(options.out, split);
    EXPECT_NEAR(static_cast<double>(images.size()), share, 2) << split;
    found.insert(images.begin(), images.end());
    EXPECT_EQ(Corpus(options.out).record(split, "image").shard_size(), (images.size() + 15) / 16);
  }
  EXPECT_EQ(found, all);

  options = image_options(folder / "official", {folder / "in/0"});
  options.valid_paths = {folder / "in/1"};
  prepare(options);
  EXPECT_EQ(images_of(options.out, "train").size(), 100u);
  EXPECT_EQ(images_of(options.out, "valid").size(), 100u);
}

TEST(PrepareImages, FilesOfManyImages) {
  TemporaryFolder folder;
  std::vector<Image> gray, color, small;
  std::vector<Bytes> gray_bytes, color_bytes, small_bytes;
  for (int i = 0; i < 7; ++i) {
    gray.push_back(pattern(6, 5, 1, i));
    gray_bytes.push_back(gray.back().pixels);
    color.push_back(pattern(32, 32, 3, i));
    color_bytes.push_back(color.back().pixels);
    small.push_back(pattern(4, 4, 3, i));
    small_bytes.push_back(small.back().pixels);
  }
  write_text(folder / "idx/t-images-idx3-ubyte.gz", gzip_of(idx_images_of(gray)));
  write_text(folder / "idx/t-labels-idx1-ubyte.gz", gzip_of(idx_labels_of({5, 0, 4, 1, 9, 2, 1})));
  prepare(image_options(folder / "a", {folder / "idx"}));
  EXPECT_EQ(images_of(folder / "a", "train"), gray_bytes);
  EXPECT_EQ(image_labels(folder / "a", "train"), (Labels{4, 0, 3, 1, 5, 2, 1}));
  EXPECT_EQ(classes_of(folder / "a"), (std::vector<std::string>{"0", "1", "2", "4", "5", "9"}));
  // Other labels are another input, also if only the images are given.
  const auto only_images = image_options(folder / "b", {folder / "idx/t-images-idx3-ubyte.gz"});
  prepare(only_images);
  EXPECT_TRUE(prepare(only_images).already_prepared);
  write_text(folder / "idx/t-labels-idx1-ubyte.gz", gzip_of(idx_labels_of({5, 0, 4, 1, 9, 2, 0})));
  expect_error(ExitCode::kUsage, [&] { prepare(only_images); }, {"other images"});

  write_text(folder / "cifar/data_batch_1.bin",
             cifar_of(color, {{0}, {1}, {2}, {3}, {4}, {5}, {9}}));
  write_text(folder / "cifar/readme.html", "CIFAR-10");
  prepare(image_options(folder / "c", {folder / "cifar"}));
  EXPECT_EQ(images_of(folder / "c", "train"), color_bytes);

  for (const bool deflated : {false, true}) {
    const std::string name = deflated ? "deflated" : "stored";
    write_text(folder / (name + ".npz"), npz_of(small, {10, 9, 8, 7, 100, 5, 4}, deflated));
    ImageCommand options = image_options(folder / name, {folder / (name + ".npz")});
    options.images.shard_bytes = 2 * 48;
    options.valid_fraction = 0.3;
    prepare(options);
    verify_corpus(Corpus(options.out));
    std::vector<Bytes> both = images_of(options.out, "train");
    for (const Bytes& image : images_of(options.out, "valid")) both.push_back(image);
    EXPECT_THAT(both, testing::UnorderedElementsAreArray(small_bytes));
    EXPECT_EQ(classes_of(options.out).back(), "100");
  }
}

TEST(PrepareImages, SizesAndChannelsAreMadeEqualOnlyOnRequest) {
  TemporaryFolder folder;
  write_text(folder / "in/a.png", png_of(pattern(10, 8, 3)));
  write_text(folder / "in/b.png", png_of(pattern(8, 14, 3)));
  ImageCommand options = image_options(folder / "corpus", {folder / "in"});
  expect_error(ExitCode::kUsage, [&] { prepare(options); },
               {"b.png", "8 x 14", "a.png", "10 x 8", "--image-size"});
  options.images.form.size = {{4, 6}};
  prepare(options);
  EXPECT_EQ(images_of(options.out, "train"),
            (std::vector<Bytes>{resized(pattern(10, 8, 3), {4, 6}).pixels,
                                resized(pattern(8, 14, 3), {4, 6}).pixels}));
  EXPECT_EQ(Corpus(options.out).record("train", "image").resized(),
            "to cover 4 x 6 by the triangle filter, cropped at the center");
  write_text(folder / "in/c.png", png_of(pattern(5, 5, 1)));
  options.out = folder / "gray";
  expect_error(ExitCode::kUsage, [&] { prepare(options); },
               {"c.png", "1 channel", "a.png", "--channels"});
  options.images.form.channels = 1;
  prepare(options);
  EXPECT_EQ(images_of(options.out, "train")[0],
            resized(with_channels(pattern(10, 8, 3), 1), {4, 6}).pixels);
}

TEST(PrepareImages, DamageEndsTheCommandOrIsCounted) {
  TemporaryFolder folder;
  for (int i = 0; i < 6; ++i)
    write_text(folder / fmt::format("in/{}.png", i), png_of(pattern(3, 3, 1, i)));
  const std::string good = png_of(pattern(3, 3, 1, 1));
  write_text(folder / "in/1.png", good.substr(0, good.size() - 20));
  write_text(folder / "in/4.png", "");
  write_text(folder / "in/z.npz", "PK\x03\x04 and no more");
  ImageCommand options = image_options(folder / "corpus", {folder / "in"});
  expect_error(ExitCode::kData, [&] { prepare(options); },
               {"in/z.npz: damaged npz", "--skip-damaged"});
  remove_tree(folder / "in/z.npz");
  expect_error(ExitCode::kData, [&] { prepare(options); },
               {"in/1.png: damaged PNG", "--skip-damaged"});
  options.images.skip_damaged = true;
  write_text(folder / "in/z.npz", "PK\x03\x04 and no more");
  const PrepareResult result = prepare(options);
  EXPECT_THAT(result.notes, Contains(HasSubstr("skipped " + folder / "in/1.png: damaged PNG")));
  EXPECT_THAT(result.notes, Contains(HasSubstr("skipped " + folder / "in/4.png: is empty")));
  EXPECT_THAT(result.notes, Contains(HasSubstr("skipped " + folder / "in/z.npz: damaged npz")));
  EXPECT_THAT(result.notes, Contains("skipped 3 images in all"));
  EXPECT_EQ(images_of(options.out, "train"),
            (std::vector<Bytes>{pattern(3, 3, 1, 0).pixels, pattern(3, 3, 1, 2).pixels,
                                pattern(3, 3, 1, 3).pixels, pattern(3, 3, 1, 5).pixels}));
  verify_corpus(Corpus(options.out));
}

// A kill at any moment leaves nothing that looks finished, and the same command finishes the work.
TEST(PrepareImages, SurviveKill) {
  TemporaryFolder folder;
  std::vector<Image> images;
  std::vector<std::int64_t> labels;
  for (int i = 0; i < 1500; ++i) {
    images.push_back(pattern(16, 16, 3, i));
    labels.push_back(i % 7);
  }
  write_text(folder / "a.npz", npz_of(images, labels, true));
  ImageCommand options = image_options(folder / "expected", {folder / "a.npz"});
  options.valid_fraction = 0.2;
  options.images.shard_bytes = 768 * 50;
  prepare(options);
  const auto expected = content_of(folder / "expected");
  int killed = 0, kept = 0;
  for (int trial = 0; trial < 12; ++trial) {
    options.out = folder / fmt::format("corpus{}", trial);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      prepare(options);
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5 + 10 * trial));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    killed += WIFSIGNALED(status);
    struct stat before, after;
    const std::string first = options.out + "/train-image-00000.h5";
    const bool has_first = stat((options.out + "/.finished-train-00000").c_str(), &before) == 0 &&
                           stat(first.c_str(), &before) == 0;
    prepare(options);
    ASSERT_EQ(content_of(options.out), expected) << "trial " << trial;
    if (has_first && stat(first.c_str(), &after) == 0) kept += before.st_ino == after.st_ino;
    remove_tree(options.out);
  }
  EXPECT_GT(killed, 0);
  EXPECT_GT(kept, 0);
}

TEST(PrepareImages, OtherOptionsStartOverAfterAFailure) {
  TemporaryFolder folder;
  for (int i = 0; i < 9; ++i)
    write_text(folder / fmt::format("in/{}.png", i), png_of(pattern(3, 3, 1, i)));
  write_text(folder / "in/9.png", "no image");
  ImageCommand options = image_options(folder / "corpus", {folder / "in"});
  options.images.shard_bytes = 9 * 4;
  expect_error(ExitCode::kData, [&] { prepare(options); }, {"9.png"});
  EXPECT_TRUE(path_exists(folder / "corpus/.finished-train-00001"));
  // A damaged leftover is made again.
  write_text(folder / "corpus/train-image-00001.h5", "damage");
  options.images.skip_damaged = true;
  prepare(options);
  const auto content = content_of(folder / "corpus");
  options.out = folder / "other";
  prepare(options);
  EXPECT_EQ(content, content_of(folder / "other"));
  EXPECT_EQ(images_of(folder / "corpus", "train").size(), 9u);
}

// A file that could not be read, and can now, is the same input with other images.
TEST(PrepareImages, ShardsOfOtherImagesAreMadeAgain) {
  TemporaryFolder folder;
  std::vector<Image> images;
  for (int i = 0; i < 40; ++i) images.push_back(pattern(2, 2, 3, i));
  const std::string good = npz_of(images, {}), path = folder / "in/z.npz";
  std::string damaged = good;
  damaged[good.size() / 4] ^= 1;
  write_text(folder / "in/0.png", png_of(pattern(2, 2, 3)));
  write_text(path, damaged);
  const auto time = std::filesystem::last_write_time(path);
  ImageCommand options = image_options(folder / "corpus", {folder / "in"});
  options.images.skip_damaged = true;
  options.test_fraction = 0.1;
  expect_error(ExitCode::kUsage, [&] { prepare(options); }, {"the train split gets nothing"});
  EXPECT_TRUE(path_exists(folder / "corpus/.finished-test-00000"));
  write_text(path, good);
  std::filesystem::last_write_time(path, time);
  prepare(options);
  const auto content = content_of(folder / "corpus");
  EXPECT_EQ(images_of(options.out, "train").size() + images_of(options.out, "test").size(), 41u);
  options.out = folder / "fresh";
  prepare(options);
  EXPECT_EQ(content, content_of(folder / "fresh"));
}

TEST(PrepareImages, NotesOfShardsStaySmallAndNameTheirSource) {
  TemporaryFolder folder;
  configs::CorpusManifest::Record image, label;
  image.set_name("image");
  image.set_dtype(configs::CorpusManifest::u8);
  for (const int side : {2, 2, 1}) image.add_shape(side);
  label.set_name("label");
  label.set_dtype(configs::CorpusManifest::u16);
  ShardRows rows;
  rows.values.resize(12);
  for (int i = 0; i < 50000; ++i) rows.damages.add(fmt::format("in/{}.png: is empty", i));
  make_directory(folder / "corpus");
  const auto shards = [&](const char* source) {
    return RecordShards(folder / "corpus", source, image, std::nullopt);
  };
  shards("source").write("train", 0, rows);
  EXPECT_LT(file_size(folder / "corpus/.finished-train-00000"), 4096);
  RecordShards again = shards("source");
  EXPECT_THAT(again.resume(), ElementsAre(".finished-train-00000", "train-image-00000.h5"));
  Damages damages;
  EXPECT_EQ(again.split("train", 1, damages).counts().documents(), 3);
  EXPECT_EQ(damages.rows, 50000);
  EXPECT_EQ(damages.reasons, rows.damages.reasons);
  EXPECT_EQ(damages.reasons.size(), Damages::kMaxReasons);
  EXPECT_THAT(shards("source 2").resume(), testing::IsEmpty());
  EXPECT_THAT(RecordShards(folder / "corpus", "source", image, label).resume(), testing::IsEmpty());
}

TEST(PrepareImages, ReportProgress) {
  TemporaryFolder folder;
  std::vector<Image> images(100, pattern(28, 28, 1));
  write_text(folder / "x-images-idx3-ubyte", idx_images_of(images));
  std::vector<PrepareProgress> reports;
  prepare(image_options(folder / "corpus", {folder / "x-images-idx3-ubyte"}),
          [&](const PrepareProgress& progress) { reports.push_back(progress); });
  ASSERT_GE(reports.size(), 2u);
  EXPECT_EQ(reports.front().phase, "find images");
  EXPECT_EQ(reports.back().phase, "read images");
  EXPECT_EQ(reports.back().done_bytes, file_size(folder / "x-images-idx3-ubyte"));
  EXPECT_EQ(reports.back().total_bytes, reports.back().done_bytes);
  EXPECT_GT(reports.back().bytes_per_second, 0);
  EXPECT_EQ(reports.back().eta_seconds, 0);
}

TEST(PrepareImages, ReadMnist) {
  // Its labels are in another file.
  const auto images = real_data("mnist.t10k-images-idx3-ubyte.gz");
  if (!images || !real_data("mnist.t10k-labels-idx1-ubyte.gz"))
    GTEST_SKIP() << "BIRKHOFF_DATA holds no mnist.t10k-*.gz";
  TemporaryFolder folder;
  ImageCommand options = image_options(folder / "corpus", {*images});
  options.test_fraction = 0.2;
  prepare(options);
  verify_corpus(Corpus(options.out));
  EXPECT_EQ(classes_of(options.out),
            (std::vector<std::string>{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}));
  const auto train = images_of(options.out, "train"), test = images_of(options.out, "test");
  EXPECT_EQ(train.size() + test.size(), 10000u);
  // The sum of 10,000 draws has a standard deviation of 40.
  EXPECT_NEAR(static_cast<double>(test.size()), 2000, 2 * 40);
  const auto array = open_image_array(*images);
  EXPECT_THAT(train, Contains(array->image(0).pixels));
}

}  // namespace
}  // namespace birkhoff
