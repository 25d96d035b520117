// The making of a corpus of point sets: a record `points` (f32, points x coordinates) and a record
// `label`. See docs/corpus_format.md, "Point sets".
//
// An input is a file of ModelNet40's format (data/points/point_file.h), or a list of such files, a
// text whose name ends in .txt. In folders, files with other names than .h5 and .hdf5 are left out.
// The file shape_names.txt next to the files, if there is one, names the classes 0, 1, ...
#pragma once

#include <functional>

#include "data/prepare/points/point_input.h"
#include "data/prepare/prepare.h"

namespace birkhoff {

class ProcessGroup;

// prepare_records() of point sets.
PrepareResult prepare_points(const PrepareOptions& options, const PointOptions& points,
                             const std::function<void(const PrepareProgress&)>& progress = {},
                             ProcessGroup* ranks = nullptr);

}  // namespace birkhoff
