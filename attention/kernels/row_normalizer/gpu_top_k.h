// The keys that queries keep and their weights: s_ij = scale (q_i . k_j + t_ij) with terms t of
// distances, of the keys that i sees the k largest, exactly k, the first of equal ones; the weights
// are the softmax of their scores. A query that sees a score of NaN has a weight of NaN.
//
// A thread block owns a tile of queries of a head and takes the tiles of keys that they see one
// after another. A warp owns 16 queries. Each query has a sorted list of its k best keys so far.
// Most scores of a tile do not exceed the last of the list. Where some do, the warp merges them
// into it, query by query, with two elements of the list and two scores in each lane.
//
// Shared memory: the tiles of q, of k in use and of k that comes next, the scores of a tile, the
// lists. 46 KiB for D = 64 and k = 8, 98 KiB for D = 128 and k = 64. Products are 16-bit with fp32
// sums; everything else is fp32. Only one result is valid: the same bits each time.
#pragma once

#include "attention/kernels/row_normalizer/gpu_body.h"

namespace birkhoff {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <typename Thread, int kHeadDim>
class TopKChoice : public RowTilesBody<Thread, kHeadDim, TopKParams> {
  using Body = RowTilesBody<Thread, kHeadDim, TopKParams>;
  using Pairs = LanePairs<kTileRows / 8>;
  using Shape = GpuTileShape<kHeadDim>;
  using Body::first_row_;
  using Body::lane_;
  using Body::p_;
  using Body::thread_;
  using typename Body::OwnQuery;

  // Shared memory. A row of scores is padded so that the pairs of a half-warp use all banks.
  static constexpr std::uint32_t kQ = 0, kK = Shape::kRowsBytes, kScores = 3 * kK;
  static constexpr std::uint32_t kRowBytes = 4 * (kTileRows + 8);
  static constexpr std::uint32_t kLists = kScores + kTileRows * kRowBytes;

  // An element of a list.
  struct alignas(8) Kept {
    float score;
    int key;
  };

 public:
  static constexpr int kThreadBlocks = kHeadDim == 64 ? 3 : 2;

  using Body::Body;

  // The number of thread blocks.
  static std::int64_t num_tasks(const TopKParams& p) { return Body::num_tiles(p, p.queries); }
  static int shared_bytes(const TopKParams& p) {
    return static_cast<int>(kLists) + kTileRows * p.most * static_cast<int>(sizeof(Kept));
  }

  BIRKHOFF_DEVICE void run() {
    int first_query;
    const GpuHead head = this->head_of(p_.queries, first_query);
    this->load_rows(kQ, p_.q, head, first_query, p_.queries);
    for (int n = lane_; n < 16 * p_.most; n += 32) {
      thread_.store_shared(list_of(0) + 8 * n, Kept{-kInfinity, -1});
    }
    thread_.sync_warp();
    OwnQuery own[2];
    this->find_queries(own, head, first_query);
    // Of this lane's rows.
    float last[2] = {-kInfinity, -kInfinity};  // the last score of the list
    bool met_nan[2] = {false, false};
    this->visit_keys(
        this->hull_of(head.b, first_query),
        [&](int first, int stage) { this->load_rows(k_tile(stage), p_.k, head, first, p_.keys); },
        [&](int first, int stage) {
          Pairs s = {};
          this->multiply_rows(s, kQ, k_tile(stage), 0);
          this->take_scores(s, own, first, p_.scale);
          merge_tile(s, first, last, met_nan);
        });
    finish(head, first_query, met_nan);
  }

 private:
  static BIRKHOFF_DEVICE std::uint32_t k_tile(int stage) { return kK * (1 + stage); }
  // Of one of the warp's 16 rows.
  BIRKHOFF_DEVICE std::uint32_t list_of(int row) const {
    return kLists + (first_row_ + row) * p_.most * static_cast<int>(sizeof(Kept));
  }
  BIRKHOFF_DEVICE std::uint32_t scores_of(int row) const {
    return kScores + (first_row_ + row) * kRowBytes;
  }

  // Whether two ballots, of halves 0 and 1, name one of the four lanes of a row.
  static BIRKHOFF_DEVICE bool is_in(const std::uint32_t (&lanes)[2], int row) {
    return ((row < 8 ? lanes[0] : lanes[1]) >> (row % 8 * 4) & 15) != 0;
  }

  // Merges the scores of a tile of keys into the lists.
  BIRKHOFF_DEVICE void merge_tile(const Pairs& s, int first_key, float (&last)[2],
                                  bool (&met_nan)[2]) const {
    bool exceeds[2] = {false, false};
    BIRKHOFF_UNROLL
    for (int i = 0; i < 4 * (kTileRows / 8); ++i) {
      const float x = s[i / 4][i % 4];
      met_nan[i % 4 / 2] |= x != x;
      exceeds[i % 4 / 2] |= x > last[i % 4 / 2];
    }
    const std::uint32_t rows[2] = {thread_.ballot(exceeds[0]), thread_.ballot(exceeds[1])};
    if ((rows[0] | rows[1]) == 0) return;
    struct alignas(8) Two {
      float x, y;
    };
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      BIRKHOFF_UNROLL
      for (int j = 0; j < kTileRows / 8; ++j) {
        thread_.store_shared(
            scores_of(lane_ / 4 + 8 * half) + 4 * (8 * j + place_in_c(lane_, 0).column),
            Two{comparable(s[j][2 * half]), comparable(s[j][2 * half + 1])});
      }
    }
    thread_.sync_warp();
    BIRKHOFF_UNROLL_BY(1)
    for (int row = 0; row < 16; ++row) {
      if (is_in(rows, row)) merge_row(row, first_key);
    }
    thread_.sync_warp();
    BIRKHOFF_UNROLL
    for (int half = 0; half < 2; ++half) {
      last[half] = thread_.template load_shared<float>(last_of(lane_ / 4 + 8 * half));
    }
  }
  BIRKHOFF_DEVICE std::uint32_t last_of(int row) const { return list_of(row + 1) - sizeof(Kept); }

  // NaN never enters a list, and 0 has one sign.
  static BIRKHOFF_DEVICE float comparable(float x) { return x == x ? x + 0.0f : -kInfinity; }
  // The order of the bits of such scores as integers is that of the scores; its own inverse.
  static BIRKHOFF_DEVICE int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

  // The scores of a tile enter one after another, the largest first, of equal ones the first. Their
  // place is after all scores of the list that are not less and those that entered before.
  BIRKHOFF_DEVICE void merge_row(int row, int first_key) const {
    struct alignas(8) KeptBits {
      int score, key;
    };
    constexpr int kHidden = static_cast<int>(0x807fffff);  // -infinity
    const std::uint32_t list = list_of(row), scores = scores_of(row);
    KeptBits old[2];
    int score[2], rest[2], old_place[2], place[2];
    BIRKHOFF_UNROLL
    for (int m = 0; m < 2; ++m) {
      const int n = lane_ + 32 * m;
      old[m] = n < p_.most ? thread_.template load_shared<KeptBits>(list + 8 * n) : KeptBits{0, -1};
      old[m].score = n < p_.most ? ordered(old[m].score) : kHidden;
      score[m] = rest[m] = ordered(thread_.template load_shared<int>(scores + 4 * n));
      old_place[m] = n;
      place[m] = p_.most;
    }
    for (int entered = 0;; ++entered) {
      const int best = thread_.largest(rest[0] > rest[1] ? rest[0] : rest[1]);
      const int new_place = entered + num_bits(thread_.ballot(old[0].score >= best)) +
                            num_bits(thread_.ballot(old[1].score >= best));
      if (best == kHidden || new_place >= p_.most) break;
      const std::uint32_t low = thread_.ballot(rest[0] == best),
                          high = thread_.ballot(rest[1] == best);
      const int column = low != 0 ? lowest_bit(low) : 32 + lowest_bit(high);
      BIRKHOFF_UNROLL
      for (int m = 0; m < 2; ++m) {
        old_place[m] += best > old[m].score;
        if (lane_ + 32 * m != column) continue;
        place[m] = new_place;
        rest[m] = kHidden;
      }
    }
    thread_.sync_warp();  // the list has been read
    BIRKHOFF_UNROLL
    for (int m = 0; m < 2; ++m) {
      const int n = lane_ + 32 * m;
      if (n < p_.most && old_place[m] < p_.most) {
        thread_.store_shared(list + 8 * old_place[m], KeptBits{ordered(old[m].score), old[m].key});
      }
      if (place[m] < p_.most) {
        thread_.store_shared(list + 8 * place[m], KeptBits{ordered(score[m]), first_key + n});
      }
    }
  }

  // Writes the softmax of each list.
  BIRKHOFF_DEVICE void finish(GpuHead head, int first_query, const bool (&met_nan)[2]) const {
    const std::uint32_t with_nan[2] = {thread_.ballot(met_nan[0]), thread_.ballot(met_nan[1])};
    BIRKHOFF_UNROLL_BY(1)
    for (int row = 0; row < 16 && first_query + first_row_ + row < p_.queries; ++row) {
      const int query = first_query + first_row_ + row;
      const std::int64_t at = std::int64_t{head.b} * p_.queries + query,
                         list = this->number_of(head, p_.queries, query) * p_.most;
      const bool is_nan = is_in(with_nan, row);
      const float largest = thread_.template load_shared<float>(list_of(row));
      int key[2];
      float weight[2], sum = 0;
      BIRKHOFF_UNROLL
      for (int m = 0; m < 2; ++m) {
        const int n = lane_ + 32 * m;
        Kept element{0, -1};
        if (n < p_.most && n < p_.kept[at]) {
          element = thread_.template load_shared<Kept>(list_of(row) + 8 * n);
        }
        key[m] = element.key;
        weight[m] = key[m] >= 0 ? thread_.exp2((element.score - largest) * kLog2E) : 0;
        sum += weight[m];
      }
      BIRKHOFF_UNROLL
      for (int mask = 1; mask < 32; mask *= 2) sum += thread_.exchange(sum, mask);
      BIRKHOFF_UNROLL
      for (int m = 0; m < 2; ++m) {
        const int n = lane_ + 32 * m;
        if (n >= p_.most) continue;
        const bool stores_nan = n == 0 && is_nan;
        p_.index[list + n] = stores_nan && key[m] < 0 ? p_.first[at] : key[m];
        p_.weight[list + n] = stores_nan ? kNaN : key[m] >= 0 ? weight[m] / sum : 0;
      }
    }
  }
};

}  // namespace birkhoff
