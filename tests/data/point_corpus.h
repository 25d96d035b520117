// Corpora of point sets whose class is their number of clusters, for tests and benchmarks.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_writer.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {

struct ClusterSets {
  std::int64_t points = 32, dimensions = 2;
  std::int64_t train = 0, valid = 0;  // sets of the splits
  unsigned seed = 1;
};

// A set of 2 to 5 clusters of equal size; the class is their number, minus 2. Five centers are
// drawn together from [-1, 1]^P, at least 0.5 apart from each other, and the set has the first of
// them. So each of them has the same distribution, whatever the class is, and so has a point of a
// set: it tells nothing about the class.
inline std::vector<float> cluster_set(const ClusterSets& sets, int clusters,
                                      std::mt19937_64& random) {
  const auto P = static_cast<std::size_t>(sets.dimensions);
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::normal_distribution<double> noise(0, 0.05);
  std::vector<double> centers;
  const auto apart = [&] {
    for (std::size_t a = 0; a < 5; ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        double square = 0;
        for (std::size_t p = 0; p < P; ++p) {
          const double d = centers[a * P + p] - centers[b * P + p];
          square += d * d;
        }
        if (square < 0.25) return false;
      }
    }
    return true;
  };
  do {
    centers.clear();
    for (std::size_t i = 0; i < 5 * P; ++i) centers.push_back(uniform(random));
  } while (!apart());
  std::vector<float> points;
  for (std::int64_t n = 0; n < sets.points; ++n) {
    for (std::size_t p = 0; p < P; ++p) {
      const auto center = static_cast<std::size_t>(n % clusters);
      points.push_back(static_cast<float>(centers[center * P + p] + noise(random)));
    }
  }
  return points;
}

// Writes splits train and valid with the records `points` and `label`. Classes alternate.
inline void write_cluster_sets(const std::string& folder, const ClusterSets& sets) {
  using configs::CorpusManifest;
  make_directory(folder);
  CorpusManifest manifest;
  manifest.set_format(shard_format::kManifestFormat);
  manifest.set_version(shard_format::kManifestVersion);
  std::mt19937_64 random(sets.seed);
  for (const auto& [name, count] : {std::pair("train", sets.train), {"valid", sets.valid}}) {
    CorpusManifest::Record points, label;
    points.set_name("points");
    points.set_dtype(CorpusManifest::f32);
    points.add_shape(sets.points);
    points.add_shape(sets.dimensions);
    label.set_name("label");
    label.set_dtype(CorpusManifest::u16);
    for (int k = 2; k <= 5; ++k) label.add_class_name(std::to_string(k) + " clusters");
    RecordWriter point_writer(folder, name, points, /*shard_rows=*/4096),
        label_writer(folder, name, label, /*shard_rows=*/4096);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto of_set = static_cast<std::uint16_t>(i % 4);
      point_writer.append(cluster_set(sets, of_set + 2, random).data(), 1);
      label_writer.append(&of_set, 1);
    }
    auto& split = *manifest.add_split();
    split.set_name(name);
    split.mutable_counts()->set_documents(count);
    *split.add_record() = point_writer.finish();
    *split.add_record() = label_writer.finish();
  }
  write_file_durably(folder + "/" + kCorpusManifestName, manifest_json(manifest));
}

}  // namespace birkhoff
