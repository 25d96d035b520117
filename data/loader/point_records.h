// Point sets of a record, with their labels if these are asked for: the samples of classifiers of
// point sets. Sample i is set i of the split, standardized; training changes it at random.
//
// Legend: N points of a sample, M points that are stored, P coordinates.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

// The standardization of a sample x_np. Its mean m_p over n is subtracted, then it is divided by
enum class PointScaling {
  kAsStored,   // (neither)
  kDeviation,  // sqrt(sum_np (x_np - m_p)^2 / (N P))
  kRadius,     // max_n |x_n - m|
};

struct PointRecordOptions {
  std::string split = "train";
  std::string points = "points";                // the record of the sets
  std::string label{};                          // the record of the labels; empty: none are read
  std::int64_t num_points = 0, dimensions = 0;  // N and P
  PointScaling scaling = PointScaling::kDeviation;
  // Training: changes of each sample, drawn by point_change().
  bool resample = false;  // N random points of M; otherwise the first ones
  double rotation = 0;    // of the first two coordinates; a share of pi
  double min_scale = 1, max_scale = 1;
  std::uint64_t seed = 0;
};

struct PointChange {
  std::vector<std::int64_t> indices{};  // of the N points, in [0, M); empty: the first ones
  double angle = 0;                     // in radians
  double scale = 1;

  friend bool operator==(const PointChange&, const PointChange&) = default;
};

// The change of a sample in an epoch: a function of (seed, epoch, sample). Indices are a random
// subset in random order; the angle is uniform in [-rotation pi, rotation pi], the scale in
// [min_scale, max_scale].
PointChange point_change(const PointRecordOptions& options, std::int64_t stored_points,
                         std::int64_t epoch, std::int64_t sample);

// The sample [N, P] of a stored set [M, P]: its points, standardized, rotated and scaled. Equal
// points stay at the origin. P must be at least 2 if the angle is not 0.
void make_points(const PointRecordOptions& options, const PointChange& change, const float* stored,
                 float* out);

// Batches have points and, with a label, labels (data/batch/batch.h). Error(kData) if the split
// lacks them, has no set, or its sets are not f32 [M, P] with M >= N.
std::unique_ptr<SampleSource> point_records(const Corpus& corpus,
                                            const PointRecordOptions& options);

// Finds the errors of point_records() without opening any file of the corpus.
void check_point_records(const Corpus& corpus, const PointRecordOptions& options);

}  // namespace birkhoff
