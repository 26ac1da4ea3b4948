// SPDX-License-Identifier: Apache-2.0
// Finds the bytes of an output's files that nobody writes, such as those that align its data.
//
// They are zero in new files. But a run that resumes finds files of full length, where these bytes may have changed,
// and no digest covers them.
#pragma once

#include <functional>
#include <vector>

#include "lib/checkpoint/catalog.h"

namespace reshard {

class FileGaps {
 public:
  // Begins with all bytes from the first to the last element of each fragment and replica as written.
  explicit FileGaps(const Catalog& catalog);

  void add_written(std::uint32_t file, Index offset, Index length);

  // Calls visit for each run of bytes that was not added, in the order of the files. `size_of` returns a file's length.
  Status visit(const std::function<Index(std::uint32_t file)>& size_of,
               const std::function<Status(const Extent& gap)>& visit);

 private:
  const std::size_t files_;
  std::vector<Extent> written_;
};

}  // namespace reshard
