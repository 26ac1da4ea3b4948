// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/local_files.h"

namespace reshard {

LocalFiles::LocalFiles(const LayoutRequest& request)
    : request_(request), tensors_(request.tensors.begin(), request.tensors.end()) {}

namespace {

std::vector<FileTensor> stored_as(const std::vector<LocalTensor>& tensors) {
  std::vector<FileTensor> out;
  out.reserve(tensors.size());
  for (const LocalTensor& t : tensors) out.push_back({t.name, t.dtype, t.shape, {}});
  return out;
}

}  // namespace

Status LocalFiles::add_file(std::string name, const std::vector<LocalTensor>& tensors) {
  place(tensors, TRY(target_->add_file(std::move(name), request_.container, stored_as(tensors))));
  return {};
}

Status LocalFiles::add_file(std::string name, std::function<std::vector<LocalTensor>()> list) {
  const std::vector<LocalTensor> tensors = list();
  const auto list_stored = [list = std::move(list)] { return stored_as(list()); };
  place(tensors, TRY(target_->add_file(std::move(name), request_.container, stored_as(tensors), list_stored)));
  return {};
}

Status LocalFiles::add_archive(std::string name, const std::vector<LocalTensor>& tensors,
                               torch_archive::Content content) {
  place(tensors, TRY(target_->add_archive(std::move(name), stored_as(tensors), std::move(content))));
  return {};
}

void LocalFiles::place(const std::vector<LocalTensor>& tensors, const std::vector<Extent>& extents) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].constant.empty()) target_->add_constant(extents[i], tensors[i].constant);
    for (const LocalPart& part : tensors[i].parts) tensors_[part.tensor].add(tensors[i].shape, part.place, extents[i]);
  }
}

Result<std::unique_ptr<Target>> LocalFiles::finish() && {
  for (JoinedTensor& joined : tensors_) {
    TRY(check_cover(joined.tensor));
    TRY(target_->catalog().add(std::move(joined.tensor)));
  }
  return std::unique_ptr<Target>(std::move(target_));
}

}  // namespace reshard
