// Models of images as users run them: training, evaluation, pictures of samples and completions,
// and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cluster/base/error.h"
#include "tests/data/images/image_corpus.h"
#include "tests/launcher/program_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

constexpr char kPixels[] = R"(task { pixel_model {} }
data { corpus: "images" sequence_length: 72 }
model { layers: 1 channels: 16 heads: 2 positions: image_axes }
train { steps: 30 global_batch: 8 schedule { learning_rate: 1e-2 warmup_steps: 5 } }
evaluate { every: 30 }
)";
constexpr char kClasses[] = R"(task {
  image_classification { classes: 3 patch: 2 pixel_mean: 0.4 pixel_std: 0.2 augment { shift: 1 } }
}
data { corpus: "images" sequence_length: 7 }
model { layers: 1 channels: 16 heads: 2 }
train { steps: 60 global_batch: 12 schedule { learning_rate: 1e-2 warmup_steps: 5 } }
evaluate { every: 60 }
)";

std::string content(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The working directory holds a corpus of 6 x 4 x 3 images and a run of each task.
class ImagesProcess : public ProgramTest {
 protected:
  static void SetUpTestSuite() {
    make_folder("birkhoff_images");
    write_images("images", {6, 4, 3});
    write_images("gray", {6, 4, 1});
    write_images("many", {6, 4, 3}, /*classes=*/4);
    for (const auto& [name, text] : {std::pair("pixels", kPixels), {"classes", kClasses}}) {
      std::ofstream(std::string(name) + ".txtpb") << text;
      const Finished trained = birkhoff({"train", std::string(name) + ".txtpb", "--run", name});
      ASSERT_EQ(trained.code, 0) << trained.err;
    }
  }
  static void TearDownTestSuite() { remove_folder(); }

  // Width and height of a PNG, which its header holds as big-endian numbers.
  static std::pair<int, int> size_of_png(const std::string& file) {
    const std::string png = content(file);
    EXPECT_THAT(png, StartsWith("\x89PNG\r\n"));
    const auto number = [&](std::size_t at) {
      return png.size() < at + 4 ? -1
                                 : static_cast<unsigned char>(png[at + 2]) * 256 +
                                       static_cast<unsigned char>(png[at + 3]);
    };
    return {number(16), number(20)};
  }
};

TEST_F(ImagesProcess, EvalPrintsBitsPerDimOrAccuracy) {
  EXPECT_THAT(out_of({"eval", "pixels"}), HasSubstr(" nats per value, "));
  EXPECT_THAT(out_of({"eval", "pixels"}), HasSubstr(" bits per dim, 720 tokens, 10 of 10 "));
  const auto pixels = nlohmann::json::parse(out_of({"eval", "pixels", "--json"}));
  EXPECT_NEAR(pixels.at("bits_per_dim").get<double>() * std::log(2.0),
              pixels.at("loss").get<double>(), 1e-6);
  EXPECT_LT(pixels.at("bits_per_dim").get<double>(), 7.5) << "it has learned something";
  EXPECT_EQ(pixels.at("tokens").get<int>(), 720);
  EXPECT_THAT(out_of({"eval", "classes"}), HasSubstr(" nats per image, "));
  const auto classes = nlohmann::json::parse(out_of({"eval", "classes", "--json"}));
  EXPECT_GE(classes.at("accuracy").get<double>(), 0.9);
  EXPECT_EQ(out_of({"eval", "pixels", "--json", "--ranks", "2"}),
            out_of({"eval", "pixels", "--json"}));
}

TEST_F(ImagesProcess, InspectShowsTheModel) {
  EXPECT_THAT(out_of({"inspect", "pixels"}), HasSubstr("positions.columns.weight"));
  EXPECT_THAT(out_of({"inspect", "classes"}), HasSubstr("embedding.class_token"));
  for (const char* run : {"pixels", "classes"}) {
    EXPECT_THAT(out_of({"verify", run}), HasSubstr("checkpoint verified"));
  }
}

TEST_F(ImagesProcess, SamplesAreAGridOfImages) {
  // Four images of 4 columns and 6 rows, with a line between them.
  EXPECT_EQ(out_of({"sample", "pixels", "--png", "four.png", "--samples", "4"}),
            "four.png: 4 images of 6 x 4 x 3\n");
  EXPECT_EQ(size_of_png("four.png"), std::pair(9, 13));
  const std::string once = content("four.png");
  out_of({"sample", "pixels", "--png", "four.png", "--samples", "4"});
  EXPECT_EQ(content("four.png"), once);
  out_of({"sample", "pixels", "--png", "four.png", "--samples", "4", "--seed", "2"});
  EXPECT_NE(content("four.png"), once);
}

TEST_F(ImagesProcess, ADividedModelDrawsTheSame) {
  const std::vector<std::string> completions = {"sample",     "pixels", "--png",     "whole.png",
                                                "--complete", "0.8",    "--samples", "2"};
  std::vector<std::string> divided = completions;
  divided[3] = "divided.png";
  divided.insert(divided.end(), {"--tensor", "2"});
  out_of(completions);
  EXPECT_EQ(out_of(divided), "divided.png: 2 completions of 6 x 4 x 3\n");
  EXPECT_EQ(content("divided.png"), content("whole.png"));
}

TEST_F(ImagesProcess, CompletionsBeginWithTheGivenPart) {
  EXPECT_EQ(
      out_of({"sample", "pixels", "--png", "half.png", "--complete", "0.5", "--samples", "3"}),
      "half.png: 3 completions of 6 x 4 x 3\n");
  EXPECT_EQ(size_of_png("half.png"), std::pair(14, 20));  // given part, completion, image
  // With everything given the completion is the image, of the model's corpus or another one.
  out_of({"sample", "pixels", "--png", "all.png", "--complete", "1", "--samples", "2"});
  out_of({"sample", "pixels", "--png", "other.png", "--complete", "1", "--samples", "2", "--corpus",
          "many", "--split", "train"});
  out_of({"sample", "pixels", "--png", "seed.png", "--complete", "1", "--samples", "2", "--seed",
          "9"});
  EXPECT_EQ(content("seed.png"), content("all.png"));
  EXPECT_NE(content("other.png"), content("all.png"));
}

TEST_F(ImagesProcess, RefusalsAreOneLine) {
  const auto usage = ExitCode::kUsage, data = ExitCode::kData, config = ExitCode::kConfig;
  expect_refused({"sample", "pixels", "--prompt", "a"}, usage,
                 "pixels: the model generates whole images, and continues no text; leave the "
                 "prompt out, and give --png FILE");
  expect_refused({"sample", "pixels", "--png", "a.png", "--tokens", "3"}, usage,
                 "leave --tokens out");
  expect_refused({"sample", "classes", "--png", "a.png"}, usage,
                 "classes: a model of this task generates no images");
  expect_refused({"sample", "pixels", "--png", "a.png", "--samples", "11", "--complete", "0.5"},
                 usage, "--samples 11: split 'valid' of images has 10 images; lower it");
  expect_refused({"sample", "pixels", "--png", "a.png", "--complete", "0.5", "--split", "test"},
                 data, "'test'");
  expect_refused({"sample", "pixels", "--png", "nowhere/a.png"}, usage,
                 "--png nowhere/a.png: no folder nowhere");
  expect_refused({"sample", "pixels", "--png", "a.png", "--complete", "0.5", "--corpus", "gray"},
                 data, "gray: its images are 6 x 4 x 1, but the model's 6 x 4 x 3");
  expect_refused({"eval", "pixels", "--corpus", "gray"}, data,
                 "gray: its images are 6 x 4 x 1, but the model's 6 x 4 x 3 (rows, columns, "
                 "channels); prepare images of that size");
  expect_refused({"eval", "classes", "--corpus", "many"}, data,
                 "many: the classes of its labels, 4 classes (class 0, class 1, class 2, class 3), "
                 "are not the model's, 3 classes (class 0, class 1, class 2); prepare a corpus of "
                 "the same classes");
  expect_refused({"eval", "pixels", "--text", "pixels.txtpb"}, usage,
                 "--text pixels.txtpb: the model predicts no text; it reads none");
  expect_refused({"classify", "classes", "pixels.txtpb"}, usage, "no tokenizer");
  expect_refused({"analyse", "classes", "--text", "pixels.txtpb", "--html", "a.html"}, usage,
                 "no tokenizer");
  expect_refused({"plan", "pixels.txtpb", "--vocabulary", "256"}, usage,
                 "--vocabulary 256: the model reads no tokens; leave it out");
  expect_refused({"bench", "step", "classes.txtpb", "--vocabulary", "300"}, usage,
                 "--vocabulary 300: the model reads no tokens; leave it out");
  expect_refused({"bench", "comm", "classes.txtpb", "--ranks", "2", "--vocabulary", "300"}, usage,
                 "--vocabulary 300: the model reads no tokens; leave it out");
  expect_refused({"bench", "loader", "images", "--length", "32"}, usage,
                 "--length 32: split 'train' of images has no tokens, so rows of a record are "
                 "read; leave it out");
  expect_refused({"prepare", "--out", "new", "--like", "classes", "pixels.txtpb"}, usage,
                 "has no tokenizer, because its model reads no text; name a model of text");
  const auto train = [](const std::string& file, const std::string& setting) {
    return std::vector<std::string>{"train", file, "--run", "refused", "--set", setting};
  };
  expect_refused(train("pixels.txtpb", "data.sequence_length=256"), config,
                 "data.sequence_length: is 256, but an image of 6 x 4 x 3 has 72 values; set it to "
                 "72");
  expect_refused(train("classes.txtpb", "data.sequence_length=6"), config,
                 "data.sequence_length: is 6, but an image of 6 x 4 x 3 has 6 patches and the "
                 "class token; set it to 7");
  expect_refused(train("classes.txtpb", "task.image_classification.patch=4"), config,
                 "task.image_classification.patch: 4 does not divide 6 rows and 4 columns");
  expect_refused(train("classes.txtpb", "task.image_classification.classes=2"), config,
                 "task.image_classification.classes: is 2, but the corpus has 3 classes for its "
                 "label 'label'; set it to 3");
  expect_refused(train("classes.txtpb", "task.image_classification.label=image"), data,
                 "the corpus' record 'image' holds no labels; set task.image_classification.label "
                 "to one that does");
  expect_refused(train("pixels.txtpb", "task.pixel_model.image=label"), data,
                 "record 'label' of split 'train' is u16 [], not images");
  expect_refused(train("pixels.txtpb", "task.pixel_model.image=picture"), data, "'picture'");
}

TEST_F(ImagesProcess, PlansAndBenchmarksNeedNoCorpus) {
  for (const char* task : {"pixels", "classes"}) {
    const std::string file = std::string(task) + ".txtpb";
    EXPECT_THAT(out_of({"plan", file, "--set", "data.corpus=''", "--ranks", "2"}),
                HasSubstr("Parameters of the model."));
    EXPECT_THAT(out_of({"bench", "step", file, "--set", "data.corpus=''", "--steps", "2"}),
                HasSubstr("forward"));
  }
}

}  // namespace
}  // namespace birkhoff
