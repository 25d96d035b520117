// Writes a corpus of point sets whose class is the number of their clusters
// (tests/data/point_corpus.h):
//   cluster_sets FOLDER POINTS DIMENSIONS TRAIN_SETS VALID_SETS
#include "tests/data/point_corpus.h"

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: cluster_sets FOLDER POINTS DIMENSIONS TRAIN_SETS VALID_SETS\n";
    return 2;
  }
  birkhoff::write_cluster_sets(argv[1], {.points = std::atoll(argv[2]),
                                         .dimensions = std::atoll(argv[3]),
                                         .train = std::atoll(argv[4]),
                                         .valid = std::atoll(argv[5])});
  return 0;
}
