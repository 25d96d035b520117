// The index arithmetic of the GPU block-attention kernels.
#include "attention/kernels/block_attention/gpu_tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <vector>

namespace birkhoff::test {
namespace {

struct Source {
  KeyWindow window;
};
// Source; head in the group, block and first token of the queries; offset and first token of the
// keys.
using Pair = std::tuple<int, int, int, int, int, int>;

TEST(BlockAttentionTiles, EachVisiblePairOfTilesIsListedOnce) {
  const std::vector<Source> sources{
      {{0, 0, false}}, {{-2, 0, true}}, {{-1, 1, true}}, {{1, 2, false}}};
  constexpr int kGroup = 3;
  for (const int blocks : {1, 2, 5}) {
    for (const int block : {1, 64, 65, 200}) {
      std::multiset<Pair> expected, of_queries, of_keys;
      const int num_sources = static_cast<int>(sources.size());
      for (int s = 0; s < num_sources; ++s) {
        const KeyWindow& window = sources[static_cast<std::size_t>(s)].window;
        for (int n = 0; n < blocks; ++n) {
          for (int m = 0; m < blocks; ++m) {
            const int offset = m - n;
            if (offset < window.first_offset || offset > window.last_offset) continue;
            for (int i = 0; i < block; i += kTileRows) {
              for (int j = 0; j < block; j += kTileRows) {
                if (window.causal && offset == 0 && j > i) continue;
                for (int h = 0; h < kGroup; ++h) expected.insert({s, h, n, i, offset, j});
              }
            }
          }
        }
        for (int m = 0; m < blocks; ++m) {
          for (int j = 0; j < block; j += kTileRows) {
            QueryTiles tiles(window, kGroup, blocks, block, m, j);
            while (tiles.next()) {
              of_keys.insert({s, tiles.head(), tiles.n(), tiles.first_query(), tiles.offset(), j});
            }
          }
        }
      }
      for (int n = 0; n < blocks; ++n) {
        for (int i = 0; i < block; i += kTileRows) {
          KeyTiles<Source> tiles(sources.data(), num_sources, blocks, block, n, i);
          while (tiles.next()) {
            for (int h = 0; h < kGroup; ++h) {
              of_queries.insert({tiles.source(), h, n, i, tiles.offset(), tiles.first_key()});
            }
          }
        }
      }
      EXPECT_EQ(of_queries, expected) << blocks << " blocks of " << block;
      EXPECT_EQ(of_keys, expected) << blocks << " blocks of " << block;
    }
  }
}

template <int kColumns>
void check_places() {
  std::set<std::uint32_t> places;
  for (int row = 0; row < kTileRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const std::uint32_t place = place_in_tile<kColumns>(row, column);
      EXPECT_LT(place, 2 * kTileRows * kColumns);
      EXPECT_TRUE(places.insert(place).second) << row << ", " << column;
      // As the kernels step along a row and down a tile.
      EXPECT_EQ(further_right(128 * 5 + place_in_tile<kColumns>(row, column % 8), column / 8 * 8),
                128 * 5 + place);
      EXPECT_EQ(further_right(place_in_tile<kColumns>(row, column % 16), column / 16 * 16), place);
      EXPECT_EQ(
          place_in_tile<kColumns>(row % 8, column) + static_cast<unsigned>(row / 8) * 16 * kColumns,
          place);
    }
  }
  // A warp that stores its part of a result, two numbers per lane, hits each bank once.
  for (int j = 0; j < kColumns; j += 8) {
    std::set<std::uint32_t> banks;
    for (int lane = 0; lane < 32; ++lane) {
      const Place place = place_in_c(lane, 0);
      banks.insert(place_in_tile<kColumns>(place.row, j + place.column) / 4 % 32);
    }
    EXPECT_EQ(banks.size(), 32u);
  }
}

TEST(BlockAttentionTiles, PlacesAreDistinctAndFreeOfBankConflicts) {
  check_places<64>();
  check_places<128>();
  check_places<256>();
}

}  // namespace
}  // namespace birkhoff::test
