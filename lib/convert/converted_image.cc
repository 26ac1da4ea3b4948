// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/converted_image.h"

#include <algorithm>
#include <utility>

#include "lib/base/memory_limit.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/delta_chain.h"
#include "lib/convert/manifest.h"
#include "lib/engine/slabs.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr int kDigestThreads = 2;

// Returns the memory of a run: slabs of the size that these tensors force, and what it needs in addition.
Index room_to_digest(const Plan& plan, const Catalog& source, Index worker_bytes) {
  std::vector<WalkItem> items;
  for (const PlannedTensor& p : plan.tensors)
    items.push_back({p.from, source.tensors()[p.from].dtype, source.tensors()[p.from].row_group});
  constexpr Index kBeside = Index{12} << 20, kParts = 6;  // slab, scratch and converted elements of up to four times
  return kBeside + kept_bytes(items, source) +
         kDigestThreads *
             (kParts * std::max(kMinSlab, largest_group(items, source)) + decoding_memory(source) + worker_bytes);
}

Error copies_nothing(const Conversion& c) {
  return unsupported(std::string(c.format().title) + ": stores no tensor data of its own, so there is nothing to read");
}

}  // namespace

ConvertedImage::ConvertedImage(Conversion& c, bool check)
    : conversion_(c),
      data_(c.source_view().file_paths()),
      others_([&] {
        std::vector<std::string> paths = c.inputs();
        for (const SideFile& file : c.draft_.side_files)
          if (!file.path.empty()) paths.push_back(file.path);
        const Catalog& source = c.source_.catalog();
        for (const std::string& name : source.metadata_files) paths.push_back(path_join(source.root, name));
        return paths;
      }()),
      origin_(c.draft_, c.source_, c.adapter(), check) {}

Result<ConvertedImage::Listing> ConvertedImage::list(Conversion& c) {
  if (!c.target_) return copies_nothing(c);
  ConvertedImage image(c, false);
  TRY(image.add_files_inside());
  Listing out{TRY(Image::files_of(*c.target_)), image.newest_ns()};
  for (const FileBeside& file : TRY(image.files_beside())) out.files.push_back(file.entry);
  return out;
}

Result<std::unique_ptr<ConvertedImage>> ConvertedImage::open(Conversion& c, bool check) {
  return open(c, check, std::nullopt);
}

Result<std::unique_ptr<ConvertedImage>> ConvertedImage::open_to_prove(Conversion& c, Index reserved) {
  return open(c, false, reserved);
}

// With `reserved`, implements open_to_prove().
Result<std::unique_ptr<ConvertedImage>> ConvertedImage::open(Conversion& c, bool check, std::optional<Index> reserved) {
  if (!c.target_) return copies_nothing(c);
  const RunOptions& run = c.options_.run;
  const Index of_left_out = TRY(check_equal_tensors(c.draft_, c.source_.files(), run));
  std::unique_ptr<ConvertedImage> out(new ConvertedImage(c, check));
  out->deltas_ = TRY(c.open_deltas(out->origin_));
  if (!out->origin_.computes())
    out->recorded_ = TRY(SourceManifest::open(c.source_, c.plan_, c.source_view(), c.options_.model.families));
  out->digest_room_ = room_to_digest(c.plan_, c.source_view(), run.worker_bytes);
  out->proves_ = reserved.has_value();
  out->outcome_.checksums = of_left_out;
  if (c.draft_.merge) TRY(c.check_merged(out->origin_));
  TRY(out->add_files_inside());
  out->image_ = TRY(Image::create({c.plan_, out->origin_.tensors(), *c.target_, c.target_view(), out->data_}, run,
                                  reserved.value_or(out->digest_room_)));
  Image& image = *out->image_;
  if (out->manifest_inside_)
    image.add_text(*out->manifest_inside_, [shown = out.get()] { return shown->manifest_text(); });
  for (FileBeside& file : TRY(out->files_beside())) {
    const std::uint32_t number = image.add_file(file.entry.path, file.entry.size);
    const Index head = std::ssize(file.head);
    if (head > 0) {
      out->manifest_file_ = number;
      out->manifest_head_ = head;
      image.add_text({number, 0, head}, [text = std::move(file.head)] { return text; });
    }
    image.add_text({number, head, file.entry.size - head},
                   [make = std::move(file.make), head]() -> Result<std::string> { return TRY(make()).substr(head); });
  }
  return out;
}

Status ConvertedImage::unchanged() const {
  TRY(data_.check_all());
  return others_.check_all();
}

ConvertedImage::Listing ConvertedImage::listing() const { return {image_->files(), newest_ns()}; }

Index ConvertedImage::newest_ns() const { return std::max(data_.newest_ns(), others_.newest_ns()); }

// Adds the files inside an output that is one file. The digests in its manifest are zeros until it is read.
Status ConvertedImage::add_files_inside() {
  SingleFile* const file = conversion_.target_->single_file();
  if (!file || conversion_.target_->encoder()) return {};
  for (const SideFile& side : TRY(conversion_.side_files())) TRY(file->add_side_file(side.name, TRY(side.read())));
  const std::string text =
      manifest(conversion_, std::vector<TensorProof>(conversion_.plan_.tensors.size()), origin_.digests());
  TRY(file->add_side_file(std::string(kManifestFile), text));
  manifest_inside_ = TRY(find_sealed(text));  // its size is final now
  return {};
}

// Returns none if the output is one file.
Result<std::vector<ConvertedImage::FileBeside>> ConvertedImage::files_beside() {
  std::vector<FileBeside> out;
  if (manifest_inside_) return out;
  for (const SideFile& file : TRY(conversion_.side_files())) {
    const Index size = TRY(file.size());
    out.push_back({{file.name, size}, [file] { return file.read(); }});
  }
  ManifestOutline outline = outline_manifest(conversion_);
  out.push_back(
      {{std::string(kManifestFile), outline.length}, [this] { return manifest_text(); }, std::move(outline.head)});
  return out;
}

// Returns where the target writes this text.
Result<Extent> ConvertedImage::find_sealed(std::string_view text) const {
  Extent found;
  TRY(conversion_.target_->seal([](const Extent&) { return 0u; },
                                [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
                                  if (const std::size_t at = as_string(bytes).find(text); at != std::string::npos)
                                    found = {file, offset + static_cast<Index>(at), std::ssize(text)};
                                  return {};
                                }));
  if (found.length == 0) return internal_error("the manifest is not where it was put");
  return found;
}

Status ConvertedImage::prove() {
  const std::lock_guard lock(proving_);
  if (proofs_) return {};
  TRY(image_->read_rest());
  auto proofs = image_->proofs();
  if (!proofs) return internal_error("not all of the output was read");
  Transport* const ranks = conversion_.options_.run.ranks;
  TRY(add_up(ranks, *proofs));
  Index has_read_twice = image_->has_read_twice() ? 1 : 0;
  TRY(maximum(ranks, std::span(&has_read_twice, 1)));
  if (conversion_.target_->wants_crcs()) TRY(image_->crcs().gather(ranks));
  std::vector<std::byte> scratch(std::size_t{kMinSlab});
  TRY(origin_.tensors().finish(scratch, ranks));
  TRY(origin_.finish(ranks));
  outcome_.checksums += origin_.checksums_checked();
  if (recorded_)
    outcome_.digests = TRY(recorded_->check(*proofs, conversion_.draft_.names.model, conversion_.options_.run));
  // The digests of a merge's sources count what is read, so they are wrong if anything was read twice.
  if (origin_.digests() && has_read_twice > 0)
    text_ = TRY(text_of_a_pass());
  else if (origin_.digests())
    text_ = manifest(conversion_, *proofs, origin_.digests());  // now, before parts with texts are read again
  if (deltas_ && has_read_twice == 0) TRY(deltas_->check(conversion_, *proofs, *origin_.digests()));
  TRY(unchanged());
  proofs_ = std::move(proofs);
  return {};
}

Result<std::string> ConvertedImage::manifest_text() {
  if (!proves_) return text_of_a_pass();
  TRY(prove());
  return text_ ? *text_ : manifest(conversion_, *proofs_, origin_.digests());
}

// Reads all tensors for the digests.
Result<std::string> ConvertedImage::text_of_a_pass() {
  RunOptions run = conversion_.options_.run;
  run.progress = nullptr;
  run.threads = kDigestThreads;
  run.kept_bytes = 0;
  run.resident = held_bytes();  // measured now, because other users of the image hold buffers too
  run.memory = *run.resident + digest_room_;
  std::string text = TRY(conversion_.manifest_text(run, recorded_ ? &*recorded_ : nullptr));
  TRY(unchanged());
  return text;
}

}  // namespace reshard
