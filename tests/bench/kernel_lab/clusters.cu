// Clusters of unit rows: scores and the nearest centroid of each row, the rows that are nearest to
// each centroid, and the sums of online k-means.
#include <algorithm>
#include <cmath>

#include "attention/kernels/clusters/gpu_params.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

using Element = __nv_bfloat16;

constexpr int kBatch = 4, kHeads = 16, kHeadDim = 64;
constexpr std::int64_t kAllHeads = kBatch * kHeads;

struct Shape {
  int rows, clusters, window;  // window 0: no nearest rows

  std::int64_t all_rows() const { return kAllHeads * rows; }
  std::int64_t lists() const { return kAllHeads * clusters; }
  std::string text() const {
    return "L " + std::to_string(rows) + ", D 64, K " + std::to_string(clusters) +
           (window > 0 ? ", W " + std::to_string(window) : "");
  }
};

Array<std::int32_t> filled(std::int64_t size, std::int32_t with) {
  const Array<std::int32_t> made(size);
  std::int32_t* to = made.get();
  for_each(size, [=] __device__(std::int64_t i) { to[i] = with; });
  return made;
}

void fill_with_unit_vectors(const Float& centroids, std::uint64_t seed) {
  centroids.fill_random(seed);
  float* all = centroids.get();
  for_each(centroids.size() / kHeadDim, [=] __device__(std::int64_t i) {
    float* centroid = all + i * kHeadDim;
    float square = 0;
    for (int d = 0; d < kHeadDim; ++d) square += centroid[d] * centroid[d];
    for (int d = 0; d < kHeadDim; ++d) centroid[d] /= sqrtf(square);
  });
}

void fill_with_ends(const Array<std::int32_t>& ends, const Shape& s) {
  std::int32_t* end = ends.get();
  for_each(ends.size(), [=] __device__(std::int64_t i) {
    end[i] = (static_cast<std::int32_t>(i) % s.clusters + 1) * s.window;
  });
}

struct Tensors {
  Tensors(const Shape& s, std::uint64_t seed)
      : x(s.all_rows() * kHeadDim),
        unit(s.all_rows() * kHeadDim),
        centroids(std::int64_t{kHeads} * s.clusters * kHeadDim),
        inverse(s.all_rows()),
        best_score(s.all_rows()),
        distance(kAllHeads),
        sums(s.lists() * (kHeadDim + 1)),
        documents(filled(s.rows, 0)),
        document_ends(filled(1, s.rows)),
        cluster(s.all_rows()),
        nearest(std::max<std::int64_t>(1, s.lists() * s.window)),
        ends(s.lists()),
        keys(std::max<std::int64_t>(
            1, s.window > 0 ? kAllHeads * ClusterRowsParams::kChunk * s.rows : 0)) {
    x.fill_random(seed);
    fill_with_unit_vectors(centroids, seed + 1);
    fill_with_ends(ends, s);
    const auto rows_of = [&](const Half& of) {
      const std::int64_t of_head = std::int64_t{s.rows} * kHeadDim;
      return RowsParams{of.get(), {kHeads * of_head, of_head, kHeadDim}};
    };
    params.shape = {KernelDtype::kBFloat16, kBatch, kHeads, s.rows, kHeadDim, s.clusters, 1};
    params.x = rows_of(x);
    params.unit = rows_of(unit);
    params.centroids = centroids.get();
    params.documents = documents.get();
    params.shared_documents = true;
    params.inverse = inverse.get();
    params.best_score = best_score.get();
    params.cluster = cluster.get();
    params.distance = distance.get();
    if (s.window > 0) {
      params.num_documents = 1;
      params.slots = s.clusters * s.window;
      params.document_ends = document_ends.get();
      params.ends = ends.get();
      params.nearest = nearest.get();
      params.keys = keys.get();
    }
    of_sums = {params.shape, params.unit, cluster.get(), sums.get()};
  }

  Half x, unit;
  Float centroids, inverse, best_score, distance, sums;
  Array<std::int32_t> documents, document_ends, cluster, nearest, ends;
  Array<std::uint32_t> keys;
  ClusterRowsParams params{};
  ClusterSumsParams of_sums{};
};

// The largest score of each row, and unit rows of type T.
template <typename T>
void solve_rows(const Shape& s, const Tensors& t, const Float& best_score, const Array<T>& unit) {
  const Element* x = t.x.get();
  const float* centroids = t.centroids.get();
  float* best = best_score.get();
  T* to = unit.get();
  for_each(s.all_rows(), [=] __device__(std::int64_t i) {
    const Element* row = x + i * kHeadDim;
    double square = 0;
    for (int d = 0; d < kHeadDim; ++d)
      square += static_cast<double>(to_float(row[d])) * to_float(row[d]);
    const double factor = 1 / sqrt(square);
    double largest = -2;
    for (int c = 0; c < s.clusters; ++c) {
      const float* centroid = centroids + (i / s.rows % kHeads * s.clusters + c) * kHeadDim;
      double sum = 0;
      for (int d = 0; d < kHeadDim; ++d) sum += static_cast<double>(to_float(row[d])) * centroid[d];
      largest = fmax(largest, sum * factor);
    }
    best[i] = static_cast<float>(largest);
    for (int d = 0; d < kHeadDim; ++d) {
      to[i * kHeadDim + d] = from_float<T>(static_cast<float>(to_float(row[d]) * factor));
    }
  });
}

// How far the lists of nearest rows are from those that the kernel's own scores ask for. All
// clusters must be in one chunk, so that their scores are still in memory.
Distance distance_of_lists(const Shape& s, const Tensors& t) {
  const Array<std::uint8_t> is_chosen(s.lists() * s.rows);
  const std::uint32_t* keys = t.keys.get();
  std::uint8_t* chosen = is_chosen.get();
  const auto list_of = [=] __device__(std::int64_t i) {
    const std::int64_t list = i / s.rows;
    return (list / s.clusters * ClusterRowsParams::kChunk + list % s.clusters) * s.rows;
  };
  for_each(is_chosen.size(), [=] __device__(std::int64_t i) {
    const std::uint32_t* list = keys + list_of(i);
    const int row = static_cast<int>(i % s.rows);
    int before = 0;
    for (int r = 0; r < s.rows; ++r) {
      before += list[r] > list[row] || (list[r] == list[row] && r < row);
    }
    chosen[i] = before < s.window;
  });
  const Float exact(s.lists() * s.window), seen(s.lists() * s.window);
  float *to = exact.get(), *found = seen.get();
  const std::int32_t* nearest = t.nearest.get();
  for_each(is_chosen.size(), [=] __device__(std::int64_t i) {
    if (chosen[i] == 0) return;
    const std::int64_t list = i / s.rows;
    int place = 0;
    for (std::int64_t r = list * s.rows; r < i; ++r) place += chosen[r];
    to[list * s.window + place] = static_cast<float>(i % s.rows);
    found[list * s.window + place] = static_cast<float>(nearest[list * s.window + place]);
  });
  return distance(seen, exact);
}

void cluster_rows(Lab& lab, const Shape& s) {
  if (!lab.wants("cluster rows", s.text())) return;
  const Tensors first(s, 1);
  const std::int64_t bytes = first.x.bytes() + first.unit.bytes() + 3 * first.inverse.bytes();
  std::vector<Tensors> copies{first};
  while (static_cast<int>(copies.size()) < lab.copies(bytes))
    copies.emplace_back(s, 100 + copies.size());
  const Float best(s.all_rows()), unit(first.x.size());
  const Half rounded(first.x.size());
  solve_rows(s, first, best, rounded);
  solve_rows(s, first, best, unit);
  // The scores of all clusters are written once; reading them again is left to the caches.
  const std::int64_t scores = s.window > 0 ? 4 * s.lists() * s.rows : 0;
  Case each{"cluster rows", s.text(), static_cast<double>(bytes + scores),
            2.0 * static_cast<double>(s.all_rows()) * s.clusters * kHeadDim, bytes};
  each.launch = [=](int i, cudaStream_t stream) {
    launch_cluster_rows(copies[static_cast<std::size_t>(i)].params, stream);
  };
  each.outputs = {output("unit rows", first.unit, unit, rounded),
                  output("best scores", first.best_score, best, best)};
  each.outputs[1].epsilon = 0x1p-19f;  // a sum of 64 products
  if (s.window > 0) {
    each.outputs.push_back(
        {"nearest rows", [=] { first.nearest.poison(); }, [=] { return checksum(first.nearest); },
         [=] { return distance_of_lists(s, first); }, [] { return Distance{}; }, 0x1p-22f});
  }
  lab.run(each);
}

void cluster_sums(Lab& lab, const Shape& s) {
  if (!lab.wants("k-means sums", s.text())) return;
  const Tensors first(s, 1);
  launch_cluster_rows(first.params, nullptr);
  const std::int64_t bytes = first.unit.bytes() + first.cluster.bytes() + first.sums.bytes();
  std::vector<Tensors> copies{first};
  while (static_cast<int>(copies.size()) < lab.copies(bytes)) {
    copies.emplace_back(s, 100 + copies.size());
    launch_cluster_rows(copies.back().params, nullptr);
  }
  const Float exact(first.sums.size());
  const Element* unit = first.unit.get();
  const std::int32_t* cluster = first.cluster.get();
  float* to = exact.get();
  for_each(exact.size(), [=] __device__(std::int64_t i) {
    const std::int64_t list = i / (kHeadDim + 1), head = list / s.clusters;
    const int d = static_cast<int>(i % (kHeadDim + 1));
    double sum = 0;
    for (std::int64_t row = head * s.rows; row < (head + 1) * s.rows; ++row) {
      if (cluster[row] != list % s.clusters) continue;
      sum += d < kHeadDim ? to_float(unit[row * kHeadDim + d]) : 1.0f;
    }
    to[i] = static_cast<float>(sum);
  });
  Case each{"k-means sums", s.text(), static_cast<double>(bytes), 0, bytes};
  each.launch = [=](int i, cudaStream_t stream) {
    launch_cluster_sums(copies[static_cast<std::size_t>(i)].of_sums, stream);
  };
  each.outputs = {output("sums", first.sums, exact, exact)};
  each.outputs[0].epsilon = 0x1p-18f;  // a sum of hundreds of rows
  lab.run(each);
}

}  // namespace

void cases(Lab& lab) {
  for (const Shape& s : {Shape{1024, 4, 0}, Shape{1024, 4, 256}, Shape{4096, 16, 0},
                         Shape{4096, 16, 256}, Shape{16384, 64, 0}}) {
    cluster_rows(lab, s);
  }
  for (const Shape& s : {Shape{1024, 4, 0}, Shape{4096, 16, 0}, Shape{16384, 64, 0}}) {
    cluster_sums(lab, s);
  }
}

}  // namespace birkhoff::lab
