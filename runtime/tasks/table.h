// The tasks of table.cpp, each in a file of its own. Error(kConfig) as make_task().
#pragma once

#include <memory>

#include "runtime/tasks/task.h"

namespace birkhoff {

std::unique_ptr<Task> make_language_model_task(const configs::Config& config);
std::unique_ptr<Task> make_text_classification_task(const configs::Config& config);

}  // namespace birkhoff
