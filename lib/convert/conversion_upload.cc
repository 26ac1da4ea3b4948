// SPDX-License-Identifier: Apache-2.0
// Running a conversion whose output goes to a bucket.
#include <algorithm>
#include <utility>

#include "lib/base/memory_limit.h"
#include "lib/base/output_guard.h"
#include "lib/convert/conversion.h"
#include "lib/convert/converted_image.h"
#include "lib/engine/walk.h"
#include "lib/image/image_upload.h"
#include "lib/output/upload.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

Upload::Memory upload_memory(const Target& target, const RunOptions& run, bool reads_ahead) {
  release_freed_memory();
  return Upload::plan_memory(run.memory - held_bytes(), Upload::part_bytes(target.catalog()), reads_ahead);
}

}  // namespace

Result<Conversion::Outcome> Conversion::upload(OutputPath destination) {
  const RunOptions& run = options_.run;
  const bool is_first = rank_of(run.ranks) == 0;
  const std::uint64_t plan_fingerprint = fingerprint(plan_, source_view(), target_view());
  TRY(check_same_plan(plan_fingerprint));
  if (rank_count(run.ranks) > 1 && run.strategy != Strategy::kDirect)
    return usage_error("several ranks can write to a bucket only if each reads what it writes: add --strategy direct");
  destination.inputs.push_back(options_.source_path);
  for (std::string& path : inputs()) destination.inputs.push_back(std::move(path));
  TRY(check_spares_inputs(destination.path, destination.inputs));
  const bool reads_ahead = is_url(source_.catalog().root);
  const Upload::Memory memory = upload_memory(*target_, run, reads_ahead);
  const auto shown = TRY(ConvertedImage::open_to_prove(*this, memory.bytes));
  const ImageFiles files = files_to_upload(shown->image(), *target_);
  const Upload::Source source = source_of(shown->image(), files);
  Upload::Options how;
  if (is_first) how.facts = TRY(facts(plan_fingerprint));
  how.resume = options_.resume;
  how.on_note = options_.on_note;
  how.interrupt = run.interrupt;
  how.ranks = run.ranks;
  how.divides_files = !target_->wants_crcs() && !draft_.merge;
  how.workers = memory.workers;
  how.reads_ahead = reads_ahead;
  how.is_own_file = [this](const std::string& url) -> Result<bool> {
    const SingleFile* const file = target_->single_file();
    return file && TRY(file->is_own_file(url));
  };
  const auto upload = TRY(Upload::create(std::move(destination), files.files, std::move(how)));
  prove_share(shown->image(), files, *upload);
  Index bytes = 0;  // of files with tensors
  for (const UploadFile& file : files.files) bytes += file.holds_tensors ? file.size : 0;
  const auto progress = [&](Index done) {
    const double share = static_cast<double>(done) / static_cast<double>(std::max<Index>(1, bytes));
    if (run.progress) run.progress(static_cast<Index>(share * static_cast<double>(plan_.bytes_read)));
  };
  const auto write = [&]() -> Status {
    TRY(upload->send(source, progress));
    TRY(shown->prove());
    return upload->publish(source);
  };
  if (const Status written = write(); !written) return upload->give_up(written.error());
  return shown->outcome();
}

}  // namespace reshard
