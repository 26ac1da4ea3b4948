// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/format.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard {
namespace {

// Returns what one read of the first `length` bytes gives. A mount of reshard gives less where the rest of a file is
// expensive (the digests of a manifest); reading on until `length` would compute it.
Result<std::string> read_start_once(const std::string& path, Index length) {
  const File file = TRY(File::open(path));
  if (file.descriptor() < 0) return read_file_start(path, length);  // a URL
  std::string out(std::min(length, TRY(file.size())), '\0');
  ssize_t n = 0;
  do n = sys().pread(file.descriptor(), out.data(), out.size(), 0);
  while (n < 0 && errno == EINTR);
  if (n < 0) return io_error(path + ": cannot read: " + std::strerror(errno));
  out.resize(n);
  return out;
}

}  // namespace

std::string files_to_restore(const std::vector<UnreadFile>& files) {
  const Index wrong = std::count_if(files.begin(), files.end(), [](const UnreadFile& f) { return f.is_index_wrong; });
  if (wrong == std::ssize(files)) return "";
  return wrong > 0 ? "the others" : files.size() == 1 ? "it" : "them";
}

Status without_unread_files(Status opened, const Catalog& catalog, const OpenOptions& options) {
  constexpr std::size_t kShown = 100;
  const std::vector<UnreadFile>& files = catalog.unread_files;
  const bool is_denied = std::any_of(files.begin(), files.end(), [](const UnreadFile& f) { return f.is_denied; });
  const bool is_of_use = opened && !catalog.tensors().empty();
  if (files.empty() || (is_of_use && options.skip_damaged && !is_denied)) return opened;
  std::vector<std::string> lines;
  for (const UnreadFile& file : files)
    lines.push_back(file.why.message() +
                    (file.tensors.empty() ? "" : "; affected: " + names_text(file.tensors, "tensor")));
  const ErrorCode code = is_denied ? ErrorCode::kIo : files.front().why.code();
  const bool has_advice = is_of_use && !is_denied;  // verify, too, refuses a checkpoint if a file's access is denied
  std::string advice = "reshard verify lists what the other files have";
  if (const std::string lost = files_to_restore(files); !lost.empty())
    advice += "; restore " + lost + " from another copy of the checkpoint";
  if (lines.size() == 1) return Error(code, lines.front() + (has_advice ? ". " + advice : ""));
  std::string text = catalog.where() + ": " + count_of(std::ssize(lines), "file") + " cannot be read:";
  for (std::size_t i = 0; i < std::min(kShown, lines.size()); ++i) text += "\n  " + lines[i];
  if (lines.size() > kShown) text += "\n  and " + with_commas(std::ssize(lines) - Index{kShown}) + " more";
  return Error(code, text + (has_advice ? "\n" + advice : ""));
}

Result<std::optional<std::string>> Reader::side_file(const std::string& name, Index limit) {
  for (const std::string& directory : side_directories())
    if (const std::string path = path_join(directory, name); TRY(path_exists(path)))
      return std::optional<std::string>(TRY(read_whole_file(path, limit)));
  const auto made = name == kConfigFile ? TRY(made_config()) : std::nullopt;
  return made ? std::optional<std::string>(python_text(*made)) : std::nullopt;
}

Result<std::optional<std::string>> Reader::side_file_start(const std::string& name, Index length) {
  for (const std::string& directory : side_directories())
    if (const std::string path = path_join(directory, name); TRY(path_exists(path)))
      return std::optional<std::string>(TRY(read_start_once(path, length)));
  return std::optional<std::string>();
}

}  // namespace reshard
