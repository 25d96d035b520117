// The tasks to come, in the words of today's schema, manifest and batch: none of them may need a
// change of a seam.
//
// Legend: B batch, T tokens, S source tokens, H height, W width, C image channels, N points, D
// dimensions.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "configs/config_io.h"
#include "configs/corpus_manifest.pb.h"
#include "data/batch/batch.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

constexpr std::int64_t B = 3, T = 8, S = 6, H = 4, W = 4, C = 3, N = 5, D = 2;

struct Corpus {
  CorpusManifest manifest;
  CorpusManifest::Split& train = *manifest.add_split();

  Corpus& stream(const std::string& name, CorpusManifest::Dtype dtype) {
    auto& added = *train.add_stream();
    added.set_name(name);
    added.set_dtype(dtype);
    return *this;
  }
  Corpus& record(const std::string& name, CorpusManifest::Dtype dtype,
                 const std::vector<std::int64_t>& shape) {
    auto& added = *train.add_record();
    added.set_name(name);
    added.set_dtype(dtype);
    for (const std::int64_t size : shape) added.add_shape(size);
    return *this;
  }
  bool has_stream(const std::string& name) const {
    for (const auto& stream : train.stream()) {
      if (stream.name() == name) return true;
    }
    return false;
  }
  bool has_record(const std::string& name) const {
    for (const auto& record : train.record()) {
      if (record.name() == name) return true;
    }
    return false;
  }
};

configs::Config config(const std::string& text) { return parse_config(text, "text", {}); }

Batch batch_of(std::map<std::string, at::Tensor, std::less<>> fields) {
  Batch batch;
  batch.fields = std::move(fields);
  batch.sample_ids_B = at::arange(B, at::kLong);
  return batch;
}

at::Tensor ids(at::IntArrayRef shape) { return at::ones(shape, at::kLong); }

// Micro-batches and views work for whatever fields there are.
void expect_narrows(const Batch& batch) {
  EXPECT_EQ(batch.size(), B);
  const Batch part = batch.narrow(1, 3);
  EXPECT_EQ(part.size(), 2);
  for (const auto& [name, tensor] : batch.fields) {
    EXPECT_TRUE(at::equal(part.at(name), tensor.narrow(0, 1, 2))) << name;
  }
}

TEST(Seams, LanguageModel) {
  const configs::Config c =
      config("task { language_model {} } data { restart_at_documents: true }");
  Corpus corpus;
  corpus.stream("tokens", CorpusManifest::u16);
  EXPECT_TRUE(corpus.has_stream(c.task().language_model().stream()));
  const Batch batch = batch_of({{"inputs", ids({B, T})},
                                {"targets", ids({B, T})},
                                {"mask", at::ones({B, T}, at::kByte)},
                                {"segments", at::zeros({B, T}, at::kInt)},
                                {"positions", ids({B, T})}});
  for (const auto name :
       {field::kInputs, field::kTargets, field::kMask, field::kSegments, field::kPositions}) {
    EXPECT_TRUE(batch.has(name)) << name;
  }
  expect_narrows(batch);
}

TEST(Seams, Translation) {
  const configs::Config c = config("task { translation { source: \"en\" target: \"de\" } }");
  Corpus corpus;  // document i of both streams belong together
  corpus.stream("en", CorpusManifest::u16).stream("de", CorpusManifest::u16);
  EXPECT_TRUE(corpus.has_stream(c.task().translation().source()));
  EXPECT_TRUE(corpus.has_stream(c.task().translation().target()));
  expect_narrows(batch_of({{"source", ids({B, S})},
                           {"source_lengths", ids({B})},
                           {"inputs", ids({B, T})},
                           {"targets", ids({B, T})},
                           {"mask", at::ones({B, T}, at::kByte)}}));
}

TEST(Seams, SentenceClassification) {
  const configs::Config c = config("task { classification { classes: 2 } }");
  Corpus corpus;  // a ragged stream and a label for each of its documents
  corpus.stream("tokens", CorpusManifest::u16).record("label", CorpusManifest::i32, {});
  EXPECT_TRUE(corpus.has_stream(c.task().classification().stream()));
  EXPECT_TRUE(corpus.has_record(c.task().classification().label()));
  expect_narrows(batch_of({{"inputs", ids({B, T})}, {"lengths", ids({B})}, {"label", ids({B})}}));
}

TEST(Seams, PixelModel) {
  const configs::Config c = config("task { pixel_model {} } data { sequence_length: 48 }");
  Corpus corpus;
  corpus.record("image", CorpusManifest::u8, {H, W, C});
  EXPECT_TRUE(corpus.has_record(c.task().pixel_model().image()));
  // Sub-pixels in raster order; a position is (row, column, channel).
  EXPECT_EQ(c.data().sequence_length(), H * W * C);
  expect_narrows(batch_of({{"inputs", ids({B, H * W * C})},
                           {"targets", ids({B, H * W * C})},
                           {"mask", at::ones({B, H * W * C}, at::kByte)},
                           {"positions", ids({B, H * W * C, 3})}}));
}

TEST(Seams, ImageClassification) {
  const configs::Config c = config("task { image_classification { classes: 10 patch: 2 } }");
  Corpus corpus;
  corpus.record("image", CorpusManifest::u8, {H, W, C}).record("label", CorpusManifest::u8, {});
  EXPECT_TRUE(corpus.has_record(c.task().image_classification().image()));
  EXPECT_TRUE(corpus.has_record(c.task().image_classification().label()));
  EXPECT_EQ(H % c.task().image_classification().patch(), 0);
  expect_narrows(batch_of({{"image", at::zeros({B, H, W, C}, at::kByte)}, {"label", ids({B})}}));
}

TEST(Seams, PointSets) {
  const configs::Config c =
      config("task { point_sets { classes: 40 } } model { positions: no_positions }");
  Corpus corpus;
  corpus.record("points", CorpusManifest::f32, {N, D}).record("label", CorpusManifest::i32, {});
  EXPECT_TRUE(corpus.has_record(c.task().point_sets().points()));
  EXPECT_TRUE(corpus.has_record(c.task().point_sets().label()));
  expect_narrows(batch_of({{"points", at::zeros({B, N, D})}, {"label", ids({B})}}));
}

// Sets of many sizes are a ragged stream of rows.
TEST(Seams, RaggedRows) {
  Corpus corpus;
  corpus.stream("points", CorpusManifest::f32);
  corpus.train.mutable_stream(0)->add_shape(D);
  EXPECT_EQ(corpus.train.stream(0).shape(0), D);
}

TEST(Seams, AMissingFieldIsNamed) {
  try {
    batch_of({{"image", ids({B})}}).at("inputs");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_NE(std::string(error.what()).find("inputs"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("image"), std::string::npos);
  }
}

}  // namespace
}  // namespace birkhoff
